"""How often verdicts are right: on noise whose truth is known, simulated or taken on a machine."""
