"""Reasons why a swap leaves a site or a call to the original, each under the name that tests use.

The swap has no codes for them: a report shows them as they are here.
"""

# Of sites
SWAPPED_ALREADY = "it is swapped already"
TRAINS_OTHERWISE = "it computes something else when it trains"
UNKNOWN_BETWEEN = "what it computes between its layers is not known"
NO_SIZES = "its layers have no in_features and out_features"
WRITES_GLOBAL = "its forward writes a global variable"
NO_KNOWN_LOSS = "it is not the loss of a causal language model, nor of a masked one"
CHANGES_LOGITS = "it changes its logits before the loss"
UNUSED_LOSS = "its forward computes its loss without its loss function"
OTHER_GRADIENTS = "its gradients are those of something else"
RUNS_ADD = "its code runs add, which the kernel does not"

# Of calls
ANOTHER_LOSS = "it has another loss now"
HEAD_HOOKS = "its head has hooks"
FORWARD_MODE = "derivatives are computed in forward mode"
TRANSFORM = "inside a transform of torch.func"
GRADIENTS = "gradients are asked for"

# Of calls of attention
OPTIONS = "it is called with options that the kernel does not have"
MASK = "a mask that is not plainly causal"
ROOM_IN_CACHE = "a cache with room for more tokens"
OWN_ATTENTION = "the model does not use torch's attention"

# Of steps of optimizers
SEVERAL_DEVICES = "its parameters are on several devices"
NO_PARAMETERS = "it has no parameters"
DECAYS_BY_GRADIENTS = "weights decay by their gradients"
FLOAT64_STEPS = "its steps are counted in float64"
