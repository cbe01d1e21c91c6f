"""Redaction: secrets are taken out of all texts that kprof shows."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import unquote

import msgspec

HIDDEN = "[left out]"
HOST = "[host]"

T = TypeVar("T")
Clean = Callable[[str], str]
Named = Literal["surely", "perhaps", "other"]
"""How a name classifies its value: a possible secret is kept where it is a number."""

_ARE_SHOWN: ContextVar[bool] = ContextVar("secrets are shown", default=False)
LONGEST_ARGUMENT = 4_096
"""Characters of a word up to which percent-encoding is decoded, and names' values are compared."""


@contextmanager
def secrets_shown(*, shown: bool) -> Iterator[None]:
    """Leave secrets in every text inside this context, where `shown`."""
    token = _ARE_SHOWN.set(shown)
    try:
        yield
    finally:
        _ARE_SHOWN.reset(token)


def redacted(value: T, clean: Clean | None = None) -> T:
    """Return plain data with every text in it cleaned: of secrets, unless `clean` says more.

    In lists of arguments and in mappings, a name decides about the value that follows it.
    """
    if clean is None:
        if _ARE_SHOWN.get():
            return value
        clean = without_secrets
    return _cleaned(value, clean)  # type: ignore[no-any-return]


def redacted_json(content: bytes) -> bytes:
    """Return JSON with every text in it cleaned; the same bytes where it holds no secret."""
    plain = msgspec.json.decode(content)
    clean = redacted(plain)
    if clean == plain:
        return content
    encoded = msgspec.json.encode(clean)
    return msgspec.json.format(encoded) if b"\n" in content else encoded


def _cleaned(value: Any, clean: Clean) -> Any:  # noqa: ANN401 - any plain data
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list | tuple):
        return _cleaned_sequence(value, clean)
    if isinstance(value, Mapping):
        return {
            _cleaned(name, clean): HIDDEN if _is_hidden(name, one) else _cleaned(one, clean)
            for name, one in value.items()
        }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        new = {name: _cleaned(one, clean) for name, one in old.items()}
        changed = {name: one for name, one in new.items() if one is not old[name]}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _cleaned_sequence(value: list[Any] | tuple[Any, ...], clean: Clean) -> Any:  # noqa: ANN401
    """Return a sequence cleaned: what follows an option that hides its value is such a value."""
    if all(isinstance(one, int | float | None) for one in value):
        return value  # The numbers of a figure.
    cleaned: list[Any] = []
    are_arguments = _are_arguments(value)
    for one in value:
        new = _cleaned(one, clean)
        if are_arguments and cleaned and new == one:
            new = _cleaned_argument(cleaned[-4:], one, clean)
        cleaned.append(new)
    if all(new is old for new, old in zip(cleaned, value, strict=True)):
        return value
    if isinstance(value, list):
        return cleaned
    return type(value)(*cleaned) if hasattr(value, "_fields") else tuple(cleaned)


def _are_arguments(value: list[Any] | tuple[Any, ...]) -> bool:
    """Tell the arguments of a program from other lists of texts."""
    if not all(isinstance(one, str) and len(one) <= LONGEST_ARGUMENT for one in value):
        return False
    return any(re.match(r"-{1,2}[A-Za-z]|login$|authtoken$", one) for one in value)


def _cleaned_argument(before: list[str], argument: str, clean: Clean) -> str:
    """Return an argument cleaned as those before it demand: an option, or a command."""
    option = before[-1]
    if option.startswith("-") and "=" not in option and _is_hidden(option.lstrip("-"), argument):
        return HIDDEN
    context = " ".join(before)
    told = f"{context} {shlex.quote(argument)}"
    cleaned = clean(told)
    is_of_argument = cleaned != told and cleaned.startswith(f"{context} ")
    return cleaned[len(context) + 1 :] if is_of_argument else argument


def _is_hidden(name: object, value: object) -> bool:
    """Tell whether a name in a mapping, or an option, says that its value is a secret."""
    if not (isinstance(name, str) and isinstance(value, str)) or re.match(r"-{1,2}[A-Za-z]", value):
        return False
    # KEY of an environment hides its value, the key of a row does not.
    is_alone = name in ("key", "pass", "auth", "sig", "signature", "pin")
    return not is_alone and _is_meant(_hides(name), value)


# --- Secrets ---------------------------------------------------------------------------------


def without_secrets(text: str) -> str:
    """Return a text with a mark in place of passwords, keys and tokens, named as such or not."""
    if _ARE_SHOWN.get() or not _MAY_HOLD_SECRETS.search(text):
        return text
    # The labels of a figure: a name, which others repeat, and numbers.
    return "<br>".join(map(_without_secrets, text.split("<br>")))


# Every rule needs one of these: most texts of a report hold none and are not looked at further.
_MAY_HOLD_SECRETS = re.compile(r"[=:@%]|--?[A-Za-z]|[A-Za-z\d_+/-]{16}|(?i:login|auth|password)")


@lru_cache(maxsize=4_096)
def _without_secrets(text: str) -> str:
    # Each rule needs certain characters: most texts are names of kernels, and hold few of them.
    if "-----BEGIN" in text:
        text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _without_named(text, lambda found: _hides(found.name, found))
    if re.search(r"[\s/]", text):
        text = _AFTER.sub(lambda found: found["keep"] + HIDDEN, text)
    if re.search(r"\s|alue", text):
        text = _SIDE_BY_SIDE.sub(_without_neighbour, text)
    if "|" in text:
        text = _PIPED.sub(rf"\1{HIDDEN}", text)
    if "@" in text:
        text = _USERINFO.sub(f"{HIDDEN}@", text)
    text = _KNOWN.sub(HIDDEN, text)
    if "-p" in text or "-P" in text:
        text = _SHORT.sub(_without_password, text)
    text = _RANDOM.sub(_without_random, text)
    return _ENCODED.sub(_without_encoded, text) if "%" in text else text


# A key file, its lines joined by line ends or by "\n"; cut off, it ends where its characters do.
_PRIVATE_KEY = re.compile(
    r"-----BEGIN[A-Z0-9 ]{0,40} KEY(?: BLOCK)?-----"
    r"(?:[A-Za-z0-9+/=:,.\s\\-]{0,20000}?-----END[A-Z0-9 ]{0,40}-----|[A-Za-z0-9+/=\s\\]{0,20000})"
)
# Tokens that their service marks by their beginning. The kinds follow the rule lists of gitleaks
# and detect-secrets; lengths are minima, so that a longer generation of a token is found too.
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:A3T[A-Z0-9]|A[KS]IA|ABIA|ACCA)[A-Z0-9]{16}|ABSK[\w+/=]{40,}|LTAI\w{12,}"
    r"|AIza[\w-]{30,}|ya29\.[\w.-]{20,}|1//[\w-]{30,}|GOCSPX-[\w-]{20,}"
    r"|[\w~.]{3}\dQ~[\w~.-]{28,}"
    r"|gh[a-z]_\w{16,}|github_pat_\w{20,}|gl[a-z]{2,6}-[\w.-]{20,}|GR1348941[\w-]{20}"
    r"|AT(?:ATT3|BB|CTT3)[\w=-]{20,}"
    r"|hf_(?=[a-z]*[A-Z\d])[A-Za-z\d]{10,}|hf_[A-Za-z\d]{16,}|api_org_[A-Za-z]{20,}"
    r"|sk-(?=[\w-]{0,200}[A-Z\d])[\w-]{16,}"
    r"|(?:gsk|xai|r8|fw|tgp_v1|pcsk|rpa|jina|nvapi|pplx|tvly|csk|pa|lsv2_(?:pt|sk))[_-]"
    r"(?=[\w-]{0,200}\d)(?=[\w-]{0,200}[A-Za-z])[A-Za-z\d_-]{28,}"
    r"|(?:ak|as)-[A-Za-z\d]{22,}|wandb_v\d_\w{20,}|dapi[a-f\d]{32}(?:-\d)?|phc_\w{30,}"
    r"|xox[a-z](?:\.xox[a-z])?-[\w-]{10,}|xapp-[\w-]{20,}"
    r"|(?:sk|rk|pk|whsec)_(?:(?:live|test|prod)_)?[A-Za-z\d]{20,}|sq0[a-z]{3}-[\w-]{20,}"
    r"|shp(?:at|ca|pa|ss)_[A-Fa-f\d]{32}|SG\.[\w-]{16,}\.[\w-]{20,}|key-[a-f\d]{32}|SK[a-f\d]{32}"
    r"|xkeysib-[\w-]{40,}|[a-f\d]{32}-us\d{1,2}|\d{6,12}:A[\w-]{32,}"
    r"|npm_[A-Za-z\d]{30,}|pypi-[\w-]{40,}|rubygems_\w{40,}|oy2[a-z\d]{43}"
    r"|dckr_[a-z]{2,4}_[\w-]{16,}|cmVmd\w{50,}|AKCp\w{50,}"
    r"|do[opr]_v1_[a-f\d]{40,}|(?:fo1|fm\d\w?)_[\w+/=-]{40,}|tskey-[\w-]{16,}|HRKU-[\w-]{30,}"
    r"|hv[sbr]\.[\w-]{20,}|[A-Za-z\d]{14}\.atlasv1\.[\w=-]{40,}|dp\.[a-z]{2,5}\.\w{30,}"
    r"|pul-[a-f\d]{40}|pnu_\w{30,}|pscale_\w{2,6}_[\w.=-]{20,}|sbp_[a-f\d]{30,}"
    r"|gl(?:sa|c)_[\w+/=]{30,}|NR[A-Z]{2}-[\w-]{16,}|sntry[su]_[\w+/=]{20,}|sgp_\w{30,}"
    r"|ntn_\w{30,}|secret_[A-Za-z\d]{30,}|lin_(?:api|oauth)_\w{30,}|figd_[\w-]{30,}"
    r"|pat[A-Za-z\d]{14}\.[a-f\d]{40,}|PMAK-[\w-]{40,}|CFPAT-[\w-]{30,}|dt0[a-z]\d\d\.[\w.]{40,}"
    r"|ops_eyJ[\w+/=-]{40,}|A3-[A-Z\d]{6}-[A-Z\d-]{25,}|AGE-SECRET-KEY-1[A-Z\d]{40,}"
    r"|sha256~[\w-]{40,}|t1\.[\w-]{30,}(?:\.[\w=-]+)?|AQVN[\w-]{30,}|EAA[A-Z][\w-]{40,}"
    r"|eyJ[\w-]{8,}={0,2}(?:\.[\w+/=-]{4,}){1,4}|ZXlK[\w+/=]{40,}"
    r"|AAAA[BC]3NzaC1[\w+/=]{20,}"
    r")(?![A-Za-z0-9])"
)
_WORD_HERE = r"(?:\"(?:\\.|[^\"\\])*\"|'[^']*'|[^\s\"'\\]|\\.)+?(?=[\"'\\,;)\]}]*(?:\s|$|[|&;\"']))"
# A place says that a secret follows, not a name with a value.
_AFTER = re.compile(
    r"(?P<keep>"
    r"(?i:\b(?:bearer|basic)\s+(?=[\w.~+/-]*(?:\d|=|[a-z][A-Z])))"
    r"|\bsshpass\s+(?:-v\s+)?-p\s*"
    r"|\b(?:mysql|mysqldump|mysqladmin|mysqlimport|mariadb)\b(?:\s+[^\s|&;]+){0,20}?\s-p(?=[^\s])"
    r"|\bredis-cli\b(?:\s+[^\s|&;]+){0,20}?\s-a\s+"
    r"|\b(?:docker|podman|nerdctl|helm|oras|crane|skopeo|az|oc|buildah)\b(?:\s+[^\s|&;]+){0,20}?"
    r"\s+login\b(?:\s+[^\s|&;]+){0,20}?\s-p\s*=?\s*"
    r"|\b(?:curl|wget|https?|xh|aria2c)\b(?:\s+[^\s|&;]+){0,20}?\s(?:-u|-U|-a)\s*[\"']?[^\s:\"']+:"
    r"|(?<![\w-])--?(?:proxy-)?(?:user|auth)[\s=]+[\"']?[A-Za-z][^\s:\"'/]*:(?![\d\"'\s/])"
    r"|\b(?:wandb\s+login|modal\s+token\s+set|ngrok\s+(?:config\s+add-)?authtoken"
    r"|(?:huggingface-cli|hf\s+auth)\s+login)\s+(?!-)"
    r"|\blogin\s+\S{1,100}\s+(?:account\s+\S{1,100}\s+)?password\s+"
    r"|(?i:\bidentified\s+by\s+|\bpassword\s+(?='))"
    r"|(?i:hooks\.slack\.com/(?:services|workflows|triggers)/"
    r"|discord(?:app)?\.com/api/webhooks/\d+/|\bwebhook\.office\.com/webhookb2/)"
    r"|\bopenssl\b(?:\s+[^\s|&;]+){0,20}?\s(?:pass:|-k\s+|-K\s+)"
    r"|\b(?:zip|unzip|sqlcmd)\b(?:\s+[^\s|&;]+){0,20}?\s-P\s*"
    r"|\bssh-keygen\b(?:\s+[^\s|&;]+){0,20}?\s-N\s+"
    r"|\bldap\w+\b(?:\s+[^\s|&;]+){0,20}?\s-w\s+|\bhtpasswd\s+-\w*b\w*\s+\S+\s+\S+\s+"
    r"|\bsmbclient\b(?:\s+[^\s|&;]+){0,20}?\s-U\s*[^\s%]{1,60}%"
    r"|\blftp\b(?:\s+[^\s|&;]+){0,20}?\s-u\s*[^\s,]{1,60},"
    r"|\b(?:mongo\w*|cqlsh|beeline|rabbitmqadmin|rdesktop)\b(?:\s+[^\s|&;]+){0,20}?\s-p\s*"
    r"|\b(?:mosquitto_\w+|ipmitool|bcp|isql)\b(?:\s+[^\s|&;]+){0,20}?\s-P\s*"
    r"|\b7z\b(?:\s+[^\s|&;]+){0,20}?\s-p(?=\S)|\bxfreerdp\b(?:\s+[^\s|&;]+){0,20}?\s/p:"
    r"|\bmc\s+(?:alias|config\s+host)\s+(?:set|add)\s+\S+\s+\S+\s+\S+\s+"
    r"|\bsudo\s+-S\s+<<<\s*"
    r")(?!\[left out\]|\$)" + _WORD_HERE
)
# A secret that another program reads: echo SECRET | sudo -S.
_PIPED = re.compile(
    r"(\b(?:echo|printf)\s+(?:-\w+\s+)?(?:'%s'\s+)?)(?!\$|[\"']\$|\[left out\])([^|&;<>\n]{1,200}?)"
    r"(?=\s*\|\s*(?:sudo\s+-\w*S|su\b|\S+\s+login\b.{0,200}stdin|gh\s+auth|kinit|cryptsetup|gpg\b"
    r"|passwd|chpasswd|smbclient|wandb\s+login|openssl|docker\s+secret|kubectl\s+create\s+secret))"
)
# NAME and value side by side, which only their verb or their keys tell.
_SIDE_BY_SIDE = re.compile(
    r"(?P<keep>(?:(?<!\w)(?:setenv|set\s+-\w+|config(?:ure)?\s+set|secrets?\s+(?:set|create|add)|--env)\s+"
    r"|\\*[\"']?\b(?:name|key|Name|Key)\\*[\"']?\s*[:=]\s*\\*[\"']?)(?P<name>[A-Za-z_][\w.-]{1,100})"
    r"(?:\\*[\"']?,?\s*\\*[\"']?\b[vV]alue\\*[\"']?\s*[:=]\s*|\s+))"
    r"(?P<value>(?!-)(?:\\*\"[^\"\n]*\"|\\*'[^'\n]*'|[^\s,;}\])\"'&|]+))"
)
_USERINFO = re.compile(
    r"(?<=://)(?!\[left out\]@)"
    r"(?:[^\s/\"'`<>]+(?=@)|[^\s/:@\"'`<>]{1,60}:[^\s@\"'`<>]{1,200}(?=@))@"
    r"|(?<![\w./@-])[A-Za-z][\w.+-]{0,60}:(?!\[left out\]|[\d,]+@)[^\s:@/\"']{3,200}@"
    r"(?!sha\d)(?=[A-Za-z\d])"
)
_SHORT = re.compile(
    r"(?<![\w-])(?P<option>-(?:p|P|pw)[\s=]+)(?P<value>[\"']?[^\s\"'/:]{8,60}[\"']?)"
)
_RANDOM = re.compile(r"(?<![\w+/=~.-])[A-Za-z\d+/_=~.-]{20,}")
_ENCODED = re.compile(r"(?<![^\s\"'])[^\s\"'%]*%[0-9A-Fa-f]{2}[^\s\"']*")


def _without_neighbour(found: re.Match[str]) -> str:
    """Return a name with the value beside it, or without it where the name hides it."""
    return found["keep"] + HIDDEN if _is_meant(_hides(found["name"]), found["value"]) else found[0]


def _without_password(found: re.Match[str]) -> str:
    """Return `-p` without its value, where that is a password by its characters."""
    value = found["value"].strip("\"'")
    kinds = [bool(re.search(kind, value)) for kind in ("[a-z]", "[A-Z]", r"\d", "[!@#$%^&*?~]")]
    is_password = sum(kinds) >= 3 and not re.search(r"[=,.\[\]{}]", value)
    return found["option"] + HIDDEN if is_password else found[0]


def _without_encoded(found: re.Match[str]) -> str:
    """Return a percent-encoded word, decoded and cleaned where it holds a secret."""
    word = found[0]
    if len(word) > LONGEST_ARGUMENT:
        return word
    plain = word
    for _ in range(3):
        plain = unquote(plain)
    # In an address that was cleaned, what is left is a path or a name.
    clean = plain if plain == word else _cleaned_once(plain)
    return word if clean == plain else clean


def _cleaned_once(text: str) -> str:
    text = _without_named(text, lambda found: _hides(found.name, found))
    return _KNOWN.sub(HIDDEN, _USERINFO.sub(f"{HIDDEN}@", text))


# --- Random characters -----------------------------------------------------------------------

# Random but not secret: digests and revisions, recognised by the words before them.
_DIGEST_BEFORE = re.compile(
    r"(?i)(?:sha\d{1,3}|md5|blake\w*|digest|checksum|hash|commit|revision|rev|ref|sha|branch|tag|tree"
    r"|blob|blobs|checkout|reset|snapshots|resolve|archive|raw|gdown|id|uuid|engine|graph|\w@)"
    r"[\"']?[\s:=/@-]{0,3}(?:--hard\s|--id\s|--fuzzy\s)?[\"']?$"
)
_PATH = re.compile(r"(?:~?/|\.{1,2}/|[A-Za-z]:[\\/]|\$)|.*\.[a-z][a-z\d]{0,6}(?::\d+)*$")
_WORDS_IN = re.compile(r"[A-Z][a-z]{3,}|[a-z]{4,}")
_SIZES = re.compile(r"(?<![A-Za-z\d])[a-z]{0,2}\d+(?:x\d+)+[a-z]{0,3}(?![A-Za-z\d])")
_VOWEL = re.compile(r"(?i)[aeiouy]")


def _without_random(found: re.Match[str]) -> str:
    """Return a word without random characters: keys and tokens of unlisted services."""
    word, text, at = found[0], found.string, found.start()
    if (
        word.startswith("_Z")
        or _PATH.match(word)
        or _DIGEST_BEFORE.search(text, max(0, at - 40), at)
    ):
        return word
    if word == text and re.fullmatch(r"[a-f\d]+", word):
        return word  # A digest in a field of its own.
    start = max(text.rfind(" ", 0, at), text.rfind("\n", 0, at)) + 1
    if "://" in text[start:at] or "//" in word:
        return word
    # One value among others: a=b, or the last part of what a path holds.
    name, equals, value = word.rpartition("=") if not word.endswith("=") else ("", "", word)
    if equals and name and _DIGEST_BEFORE.search(name + "="):
        return word
    return name + equals + HIDDEN if _is_random(value) else word


def _is_random(word: str) -> bool:
    """Tell whether characters were drawn: they change between kinds often, and form no words."""
    word = _SIZES.sub("", word).rstrip("=.")
    letters = re.sub(r"[^A-Za-z\d]", "", word)
    # Base64 has one + or / among 32 characters, and the form for URLs one - or _.
    num_marks = sum(word.count(mark) for mark in "-_.=~")
    if len(letters) < 20 or len(word) - len(letters) > max(
        1, len(word) // (12 if num_marks else 8)
    ):
        return False
    num_digits = sum(map(str.isdigit, letters))
    if re.fullmatch(r"[a-f\d]+|[A-F\d]+", letters):
        return len(letters) >= 32 and 0.25 < num_digits / len(letters) < 0.95
    kinds = [_kind(one) for one in letters]
    # A capital at the beginning of a word is no change.
    changes = sum(a != b and (a, b) != ("upper", "lower") for a, b in pairwise(kinds))
    in_words = sum(len(one) for one in _WORDS_IN.findall(word) if _VOWEL.search(one))
    if not num_digits or changes < 0.22 * len(letters) or re.search(r"(?:\d+[a-z]{1,2}){8}", word):
        return False
    if {"upper", "lower"} <= set(kinds):
        return in_words <= 0.45 * len(letters)
    return len(letters) >= 24 and 0.08 < num_digits / len(letters) < 0.8


def _kind(character: str) -> str:
    if character.isdigit():
        return "digit"
    return "upper" if character.isupper() else "lower"


# --- Names with a value ----------------------------------------------------------------------

# --name value, --name=value, NAME=value, name: value, "name": value, '--name', 'value', and each of
# them inside another text, where quotes have backslashes. All parts are bounded.
_SETTING = re.compile(
    r"(?<![\w-])(?:(?P<option>--?[A-Za-z][\w.-]{0,100})"
    r"(?:(?P<equals>\s*[=:]\s*)|\\*[\"'],\s*(?=\\*[\"'])|\\*[\"'](?:\s)(?=\\*[\"'])|(?:\s|\\\r?\n)+)"
    r"|(?P<bare>[A-Za-z_][\w.-]{0,100})(?P<between>\\*[\"']?\]?\s*(?:=>|[=:](?!:))\s*))"
)
_OPENING = re.compile(r"\\*[\"'`]")
# A word of a shell: quoted parts and others side by side.
_UNQUOTED = re.compile(
    r"(?:(?i:bearer|basic|token|bot)\s+)?"
    r"(?:\"(?:\\.|[^\"\\])*\"(?=[^\s])|'[^']*'(?=[^\s])|\\[^\s\"']|\\\r?\n(?=\S)|[^\s\"'`\\&|;<>]"
    r"|[\"'&;|<>](?=[\w!@#$%^*?+.~-])(?!\w+=))+"
)
_QUOTED_PIECES = re.compile(r"(?:\"(?:\\.|[^\"\\])*\"|'[^']*'|[^\s\"'&|;<>,)\]}])*")
_SHELL_BEFORE = re.compile(r"(?:-[a-z]*c|\beval|\bssh\s+\S+)[\"']?,?\s+\\*[\"']$")


class Setting(NamedTuple):
    """A name that was found in a text, and how its value follows."""

    name: str
    is_option: bool
    between: str
    text: str
    start: int
    end: int

    @property
    def rest(self) -> str:
        """The text where the value begins, as far as a judge looks."""
        return self.text[self.end : self.end + 60]


def _without_named(
    text: str,
    judge: Callable[[Setting], Named],
    mark_of: Callable[[str], str] = lambda value: HIDDEN,
    end_of: Callable[[str, int, re.Match[str]], int] | None = None,
) -> str:
    """Return a text without the values whose names a judge knows.

    A value that is kept may hold a setting itself: --env NAME=value.
    """
    pieces = []
    at = 0
    while found := _SETTING.search(text, at):
        pieces.append(text[at : found.end()])
        at = found.end()
        name = found["option"] or found["bare"]
        # A space between an option and its value is no colon or equals sign.
        between = found["equals"] or found["between"] or ""
        setting = Setting(name, bool(found["option"]), between.strip(), text, *found.span())
        named = judge(setting)
        if named == "other":
            continue
        end = (end_of or _end_of_value)(text, at, found)
        value = text[at:end]
        if _is_meant(named, value):
            pieces.append(mark_of(value))
            at = end
    return "".join([*pieces, text[at:]])


def _end_of_value(text: str, at: int, found: re.Match[str]) -> int:
    """Return where a value ends: with its quotes, or with the quotes around name and value."""
    if text.startswith((HIDDEN, HOST), at):
        return at
    if opening := _OPENING.match(text, at):
        return _end_of_quotes(text, opening)
    if not (found["equals"] or found["between"]) and re.match(r"-{1,2}[A-Za-z]", text[at : at + 3]):
        return at  # The next option: this one has no value.
    around = re.search(r"(?<!\\)\\*[\"']$", text[max(0, found.start() - 9) : found.start()])
    has_sign = found["equals"] or "".join(found["between"] or "").strip() in ("=", ":")
    if (
        around
        and has_sign
        and not _SHELL_BEFORE.search(text, max(0, found.start() - 60), found.start())
    ):
        closing = re.compile(rf"(?<!\\){re.escape(around[0])}").search(text, at)
        if closing:
            # Shells join parts: 'p'"'"'q'.
            joined = _QUOTED_PIECES.match(text, closing.end())
            return closing.start() if not joined or not joined[0] else joined.end()
    word = _UNQUOTED.match(text, at)
    if not word:
        return at
    end = word.end()
    if text[found.start() - 1 : found.start()] in ("?", "&"):
        end = at + re.split("&|%26", text[at:end])[0].__len__()
    return at + len(text[at:end].rstrip("\"',;.)]}`"))


def _end_of_quotes(text: str, opening: re.Match[str]) -> int:
    """Return where a quoted value ends; without closing quotes, with the text."""
    quotes = opening[0]
    if len(quotes) > 1:
        closing = re.compile(rf"(?<!\\){re.escape(quotes)}").search(text, opening.end())
        return closing.end() if closing else len(text)
    if quotes == "'":
        # Python and JSON keep a quote with a backslash, which ends the value in a shell.
        whole = re.compile(r"'(?:[^'\\]|\\.)*'(?=[\s,;:)\]}\"&|]|$)", re.DOTALL).match(
            text, opening.start()
        )
        plain = whole or re.compile(r"'[^']*'").match(text, opening.start())
    else:
        plain = re.compile(rf"{quotes}(?:\\.|[^{quotes}\\])*{quotes}", re.DOTALL).match(
            text, opening.start()
        )
    if not plain:
        return len(text)
    joined = _QUOTED_PIECES.match(text, plain.end())
    return joined.end() if joined else plain.end()


_TELLS_NOTHING = re.compile(
    r"(?i)\\*[\"']?(?:[+-]?\d[\d.,_]*(?:e[+-]?\d+)?(?:[kmgtb%]|[numµ]?s)?"
    r"|true|false|none|null|nil|auto|yes|no|on|off|empty)?\\*[\"']?"
)
# A variable of a shell, a template, or what documentation writes in place of a value.
_PLACEHOLDER = re.compile(
    r"(?is)\\*[\"']?(?:\$[\w{(].*|%\w+%|[<{].*[>}]|\*+|x{3,}|\.{2,}|your[\w\s-]*"
    r"|\[(?:left out|host)\]|@/.*|os\.environ.*|getenv.*|<.*"
    r"|my[-_](?:api[-_])?(?:key|token|secret)|dummy|placeholder)?\\*[\"']?"
)
_FILE = re.compile(
    r"\\*[\"']?(?:(?:~|\.{1,2})?/[\w.@+~/-]*|[\w./-]+\.(?:json|ya?ml|txt|pem|key|crt|toml|env|py))\\*[\"']?"
)


def _is_meant(named: Named, value: str) -> bool:
    """Tell whether a value is one to hide, as its name says."""
    if named == "other" or not value or _PLACEHOLDER.fullmatch(value):
        return False
    if _FILE.fullmatch(value) and not _is_random(value.strip("\"'\\")):
        return False
    if named == "perhaps":
        return not _TELLS_NOTHING.fullmatch(value)
    return not re.fullmatch(r"(?i)\\*[\"']?(?:true|false|none|null|empty)?\\*[\"']?", value)


_NAME_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_HIDES = re.compile(
    r"apikey|(?:store|key|require|db|user|my|root|admin|smtp|mail|pg|ssh|ftp|http|proxy)pass$|secret|passw(?:or)?d|passphrase|passcode|accesskey|privatekey|authkey|accountkey"
    r"|licen[cs]ekey|encryptionkey|signingkey|storagekey|sharedkey|masterkey|deploykey|sshkey"
    r"|authtoken|accesstoken|hftoken|sessiontoken|bearer|credential|creds$|pwd$"
    r"|^(?:proxy)?authorization$|^(?:set)?cookies?$|^session(?:id)?$|^xamz(?:signature|credential)$"
    r"|^connectionstring$|webhook(?:url)?$"
)
_MAY_HIDE = {"token", "key", "pass", "auth", "pat", "sas", "sig", "signature", "dsn", "pin", "otp"}
_SUFFIXES = {"value", "string", "id", "plain", "text"}
# Names of files and commands, and of what is said about a secret.
_IS_ABOUT = {
    "file", "path", "dir", "name", "env", "type", "len", "length", "size", "format", "policy",
    "manager", "provider", "store", "stdin", "prompt", "required", "enabled", "ttl", "cmd",
}  # fmt: skip
# Tokens of a vocabulary, tokens that are counted, and keys of columns.
_SHOWS = re.compile(
    r"pad|eos|bos|unk|mask|sep|cls|stop|special|image|audio|video|per|first|next|last|inter"
    r"|sort|group|partition|primary|cache|column|text|input|output|label|prompt|message|query"
    r"|sample|batch|dict|data|metric|train|test|eval|foreign|row|routing|new|begin|end|start|num"
)


def _hides(name: str, found: Setting | None = None) -> Named:
    """Judge whether a name hides its value; without a setting, it is the name of a mapping."""
    if found and not found.is_option and found.between[:1] != "=":
        name = name.rpartition(".")[2]  # A file is no name: secret.py:12.
    joined = re.sub(r"[._-]", "", name).lower()
    words = [word.lower() for word in _NAME_WORDS.findall(name)]
    if not words or words[-1] in _IS_ABOUT or name in ("PWD", "OLDPWD"):
        return "other"
    if _HIDES.search(joined):
        return "surely"
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in _SUFFIXES):
        words.pop()
    if not (words[-1] in _MAY_HIDE or joined.endswith("token")):
        return "other"
    if any(map(_SHOWS.fullmatch, words)):
        return "other"
    if words == ["auth"] and found and re.match(r"[\s=]*[a-z_]+(?:\s|$)", found.rest):
        return "other"  # A way to log in: --auth user_principal.
    is_given = found is None or found.is_option or _is_assigned(found, name, words)
    return "perhaps" if is_given else "other"


def _is_assigned(found: Setting, name: str, words: list[str]) -> bool:
    """Tell a name that is given a value from a word of a sentence or of a formula."""
    between = found.between
    if between[0] in "\"'\\]":
        return True
    before = found.text[max(0, found.start - 1) : found.start]
    if between[0] != "=":  # A header, or a key of YAML.
        is_header = "-" in name and (name[0].isupper() or before in ("'", '"'))
        return between[0] == ":" and ("_" in name or is_header)
    return len(words) > 1 or name.isupper() or words == ["token"] or before in ("?", "&")


# --- Identities ------------------------------------------------------------------------------


def without_identities(text: str, *, keeps_web: bool = False) -> str:
    """Return a text also without prompts, addresses, hosts, device numbers, users and places.

    A path keeps its last part. An address of the web stays only where `keeps_web`, and then
    without its query.
    """
    if not text:
        return text
    return _without_identities(without_secrets(text), keeps_web)


@lru_cache(maxsize=4_096)
def _without_identities(text: str, keeps_web: bool) -> str:
    people = sorted(_people(text), key=len, reverse=True)
    text = _without_named(text, _tells_prompt, end_of=_end_of_prompt)
    text = _PROMPT_OPTION.sub(rf"\1{HIDDEN}", text)
    text = _NUMBERS.sub(HIDDEN, text)
    text = _without_named(text, _names_host, _host_mark)
    text = _without_named(text, _names_person)
    text = _MAIL.sub(_without_mail, text)
    text = _PLACED.sub(lambda found: (found["keep"] or "") + HIDDEN, text)
    text = _HOST_LISTS.sub(lambda found: found["keep"] + HOST, text)
    text = _ADDRESSES.sub(_without_address, text)
    text = _WORD.sub(lambda found: _public_part(found[0], keeps_web=keeps_web), text)
    if people:
        names = "|".join(map(re.escape, people))
        text = re.sub(rf"(?<![A-Za-z\d])(?:{names})(?![A-Za-z\d])", HIDDEN, text)
    return text


_PROMPTS = re.compile(
    r"(?:prompt|systemmessage|instructions?|inputtext|question|messages?|userinput|usermessage)s?$"
)
# Prose beside an option that means something else elsewhere: -p "Write a letter".
_PROMPT_OPTION = re.compile(
    r"((?<![\w-])(?:-p|--text|--query|--input|--input-sentence|--content|--chat|--system"
    r"|\bollama\s+run\s+\S+)[\s=]+)"
    r"(?:\"[^\"]*\s[^\"]*\"|'[^']*\s[^']*')"
)
_UUID = r"[A-Fa-f\d]{8}-(?:[A-Fa-f\d]{4}-){3}[A-Fa-f\d]{12}"
_NUMBERS = re.compile(
    rf"(?<![A-Za-z\d])(?:(?:GPU|MIG|DLA)-(?:GPU-)?{_UUID}(?:/\d+/\d+)?|{_UUID})(?![A-Za-z\d])"
    r"|(?<=:)\d{12}(?=:)|(?<![\w.])\d{12}(?=\.dkr\.)"
    r"|(?<![\w.+])\+\d{1,3}[-. (]{1,2}\d[\d .()/-]{6,16}\d|(?<![\w.+])\+\d{10,14}(?!\d)"
)
_MAIL = re.compile(
    r"(?P<user>[A-Za-z\d][\w.+%-]{0,63})@(?!sha\d)"
    r"(?P<host>\[[\da-fA-F:.]+\]|[A-Za-z\d][A-Za-z\d.-]{0,250})(?P<path>:[/~]?)?"
)
_PERSON_PATH = re.compile(
    r"(?:^|[\s\"'=:,])(?:/[\w.-]+)?/(?:home|Users|users|scratch/users|homes?)[/\\]+([\w.+-]{3,})"
    r"|[A-Za-z]:\\+Users\\+([\w.+-]{3,})|(?<![\w/])~([A-Za-z][\w.+-]{2,})(?=/)"
)
_COMMON_PERSONS = {
    "root", "admin", "ubuntu", "user", "users", "home", "data", "work", "runs", "nobody",
    "ec2-user", "runner", "jovyan", "shared", "public", "scratch", "train", "test", "model",
    "models", "default", "git", "none", "app",
}  # fmt: skip
_PERSONS = {
    "user", "username", "logname", "account", "entity", "namespace", "author", "owner", "email",
    "mail", "team", "tenant", "subscription", "org", "organization", "organisation", "customer",
    "project", "serial", "notify", "assignee", "committer", "home", "phone", "contact",
}  # fmt: skip
_PERSON_NAMES = re.compile(
    r"(?:podname|pod|projectid|serialnumber|serialno|(?:account|author|user|owner|team)name)$"
)
_HOSTS = re.compile(
    r"(?<!g)host(?!ed)|addr(?!ing)|endpoint|(?<!ob)server(?!less)|(?<!c)url$|urls$|nodelist|nodename|nodefile$"
)
# A number, a port or a device: what stands with an option for hosts and names none.
_NO_HOST = re.compile(
    r"\\*[\"']?(?:localhost|127(?:\.\d+){1,3}|0\.0\.0\.0|\[?::1?\]?|\*|any|all)(?::\d+)?\\*[\"']?"
)
_HOST_LISTS = re.compile(
    r"(?P<keep>\b(?:mpirun|mpiexec|orterun|prun|horovodrun|srun|sbatch|salloc|pdsh|clush|deepspeed|parallel-ssh)\b"
    r"(?:\s+[^\s|&;]+){0,20}?\s(?:-H|--?hosts?|-w|--include|--?host)[\s=]*)[\w.:,@\[\]-]+"
)
# Users, accounts and hosts that their command alone tells.
_PLACED = re.compile(
    r"(?P<keep>\bsudo\s+(?:-\w+\s+)?-u\s*|\bsu\s+(?:-\w*\s+)?|\bchown\s+(?:-\w+\s+)?"
    r"|\bssh\b(?:\s+-(?:[pioLRDJFbcmwWESl]\s*\S+|[\w]+))*\s+|\bssh\b[^\n|;&]{0,200}?\s-l\s*"
    r"|\b(?:ping|telnet|nslookup|dig|traceroute)\s+(?:-\w+\s+)*|\bnc\s+(?:-\w+\s+)*"
    r"|\b(?:srun|sbatch|salloc|sacctmgr)\b(?:\s+[^\s|&;]+){0,20}?\s-A\s*"
    r"|\b(?:kubectl|helm|k9s|oc)\b(?:\s+[^\s|&;]+){0,20}?\s-n\s*"
    r"|\bconfig\s+(?:--\w+\s+)?(?:user\.\w+|set\s+(?:account|project|core/\w+))\s+"
    r"|\b(?:scp|rsync)\b(?:\s+[^\s|&;]+){0,20}?\s(?=[\w.-]{2,}:[/~.\w])"
    r"|\bhost_?name:\s+)"
    r"(?!\[(?:left out|host)\]|[-$<({]|localhost\b)(?:\"[^\"\n]*\"|'[^'\n]*'|[\w.+-]+)"
    r"|(?<![\w-])[a-z\d](?:[a-z\d-]{0,60})-(?=[a-f\d]*\d)[a-f\d]{8,10}-(?=[a-z\d]*\d)[a-z\d]{5}(?![\w-])"
)
_ADDRESSES = re.compile(
    r"(?<![\w.-])(?:\d{1,3}\.){3}\d{1,3}(?![\w-]|\.\d)"
    r"|(?<![\w:.-])(?:[\dA-Fa-f]{2}[:-]){5}[\dA-Fa-f]{2}(?![\w:-])"
    r"|(?<![\w:.-])(?:[\dA-Fa-f]{4}\.){2}[\dA-Fa-f]{4}(?![\w:.-])"
    r"|(?<![\w:.])(?:[\dA-Fa-f]{1,4}:){7}[\dA-Fa-f]{1,4}(?![\w:])"
    r"|(?<![\w:.])(?:[\dA-Fa-f]{1,4}:){1,6}(?::[\dA-Fa-f]{1,4}){1,6}(?![\w:])"
    r"|(?<![\w:.])(?:[\dA-Fa-f]{2,4}:){2,7}:(?![\w:])"
    r"|(?<![\w.-])ip-(?:\d{1,3}-){3}\d{1,3}(?:\.[\w.-]+)?"
    r"|(?<![A-Za-z\d\\])[A-Z][A-Z\d-]{1,14}\\{1,2}[A-Za-z][\w.-]{1,40}"
    r"|(?<![\w./@-])(?:[A-Za-z\d](?:[A-Za-z\d-]{0,62})\.){1,6}"
    r"(?:internal|local|lan|corp|intra|localdomain|com|org|edu|gov|cloud)(?![\w.=(-]|:\w*[A-Za-z])"
    r"|(?<![\w./@-])(?:[A-Za-z\d](?:[A-Za-z\d-]{0,62})\.){2,6}"
    r"(?:net|io|ai|dev|eu|de|uk|fr|ch|jp|cn|in|nl|se|us|ca|au|kr|tech|app)(?![\w.=(-]|:\w*[A-Za-z])"
)


def _people(text: str) -> set[str]:
    """Return the user names that home folders and addresses in a text tell."""
    found = {
        next(filter(None, one.groups())) for one in _PERSON_PATH.finditer(text) if any(one.groups())
    }
    return {name for name in found if name.lower() not in _COMMON_PERSONS}


def _tells_prompt(found: Setting) -> Named:
    """Judge whether a name is of a text for a model; of its length or its file, it is none."""
    words = [word.lower() for word in _NAME_WORDS.findall(found.name)]
    if not words or words[-1] in _IS_ABOUT - {"prompt"} or {"num", "max", "min"} & set(words[:-1]):
        return "other"
    if not found.is_option and not found.between:
        return "other"
    is_content = words == ["content"] and found.between[:1] in ('"', "'", "\\")
    return "perhaps" if is_content or _PROMPTS.search("".join(words)) else "other"


def _end_of_prompt(text: str, at: int, found: re.Match[str]) -> int:
    """Return where a prompt ends: without quotes, before the next option."""
    end = _end_of_value(text, at, found)
    if _OPENING.match(text, at) or not found["option"] or found["equals"]:
        return end
    plain = re.compile(r"(?:(?!\s-{1,2}[a-zA-Z])[^\n])+").match(text, at)
    return plain.end() if plain and end > at else end


def _names_host(found: Setting) -> Named:
    """Judge whether a name says that its value is a host or an address."""
    words = [word.lower() for word in _NAME_WORDS.findall(found.name)]
    if not _is_given(found) or not words or words[-1] in _IS_ABOUT - {"name"}:
        return "other"
    return "perhaps" if _HOSTS.search("".join(words)) else "other"


def _host_mark(value: str) -> str:
    """Return the mark of a host with its port; this machine itself is no secret."""
    if _NO_HOST.fullmatch(value):
        return value
    port = re.fullmatch(r"[\w.-]+(:\d{1,5})", value)
    return HOST + (port[1] if port else "")


def _names_person(found: Setting) -> Named:
    """Judge whether a name says that its value is a person, a team or an account."""
    words = [word.lower() for word in _NAME_WORDS.findall(found.name)]
    if not _is_given(found) or not words:
        return "other"
    is_person = words[-1] in _PERSONS or _PERSON_NAMES.search("".join(words))
    return "perhaps" if is_person else "other"


def _is_given(found: Setting) -> bool:
    """Tell an option, an assignment and a key of JSON from a word of a sentence."""
    return found.is_option or found.between[:1] in ("=", '"', "'", "\\")


def _without_mail(found: re.Match[str]) -> str:
    """Return a mark in place of user@host; a metric such as pass@k or a version is neither."""
    host = found["host"]
    is_version = re.fullmatch(r"v?[\d.]+[a-z]?\d*", host) and not _is_address(host)
    if len(host) < 3 or is_version:
        return found[0]
    return HIDDEN + (found["path"] or "")


def _is_address(text: str) -> bool:
    parts = text.split(".")
    return len(parts) == 4 and all(part.isdigit() and int(part) < 256 for part in parts)


def _without_address(found: re.Match[str]) -> str:
    """Return a mark in place of an address, unless it is this machine or another number."""
    word = found[0]
    before = found.string[max(0, found.start() - 12) : found.start()]
    if re.fullmatch(r"(?:\d{1,3}\.){3}\d{1,3}", word):
        is_version = re.search(r"(?i)(?:[=<>~!]=|version\s?|cudnn[ -]|nccl[ -]|driver )$", before)
        is_here = word.startswith("127.") or word == "0.0.0.0"
        return word if is_version or is_here or not _is_address(word) else HOST
    if "::" in word:  # A slice of Python and a name of C++ have colons too.
        groups = [group for group in word.split(":") if group]
        is_long = any(len(group) == 4 for group in groups) or len(groups) >= 4
        return HOST if is_long and re.search(r"\d", word) else word
    if re.fullmatch(r"[\d-]+", word):
        return word  # A date with its time.
    return HIDDEN if "\\" in word else HOST


_WORD = re.compile(
    r"[a-zA-Z][a-zA-Z0-9+.-]{1,15}://(?:\[left out\]|\[host\]|\[[\da-fA-F:.]+\]|[^\s\"'`<>|;,])+"
    r"|[^\s\"'`<>|;,()\[\]{}=]+"
)
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_EXTENSION = re.compile(r"\.[A-Za-z]\w{0,7}$")
_NETWORKS = (".internal", ".local", ".lan", ".corp", ".intra", ".localdomain")
_ALONE = re.compile(
    r"(?:/[\w.-]+)*/(?:home|Users|users|homes?)/[^/\\]+/?|~[\w.+-]+/?|[A-Za-z]:\\+Users\\+[^\\/]+\\?"
)


def _public_part(word: str, *, keeps_web: bool) -> str:
    """Return a word without the folders above a file, and without an address."""
    if "://" in word:
        is_kept = keeps_web and word.startswith(("https://", "http://"))
        return _without_query(word) if is_kept else HIDDEN
    if _ALONE.fullmatch(word):
        return HIDDEN  # The last part of a home folder is a user.
    if _DRIVE.match(word) or word.startswith("\\\\"):
        return re.split(r"[\\/]+", word)[-1] or HIDDEN
    return ":".join(_without_place(piece) for piece in word.split(":"))


def _without_query(address: str) -> str:
    """Return an address on the web as far as it is public."""
    scheme, _, rest = address.partition("?")[0].partition("://")
    if "@" in rest.partition("/")[0]:
        return HIDDEN
    host = rest.partition("/")[0].partition(":")[0]
    return f"{scheme}://{HOST}" if _without_place(host) == HOST else f"{scheme}://{rest}"


def _without_place(word: str) -> str:
    """Return the last part of a path, and a mark in place of an address of the network."""
    if word.lower().endswith(_NETWORKS):
        return HOST
    parts = [part for part in re.split(r"[\\/]+", word) if part not in ("", ".", "..", "~")]
    is_rooted = word.startswith(("/", "~", "./", "../"))
    is_deep = len(parts) > 2 and all(len(part) > 1 and not part.isdigit() for part in parts)
    if parts and (is_rooted or is_deep or (len(parts) > 1 and _EXTENSION.search(parts[-1]))):
        return parts[-1]
    return word
