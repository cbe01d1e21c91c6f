"""Settings in a text: options and names with a value, and which values are secrets or hosts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

Named = Literal["surely", "perhaps", "other"]
"""What a name says of its value; what is perhaps meant is not where the value is a number."""

# --name value, --name=value, NAME=value, name: value, "name": value, '--name', 'value'. All parts
# are bounded or begin where a word does, so that they take no longer than a text.
_SETTING = re.compile(
    r"(?<![\w-])(?:(?P<option>--?[A-Za-z][\w.-]{0,100})"
    r"(?:(?P<equals>\s*[=:]\s*)|[\"'],\s*(?=[\"'])|\s+)"
    r"|(?P<bare>[A-Za-z_][\w.-]{0,100})(?P<between>\\?[\"']?\s*[=:](?!:)\s*))"
)
# One word of a shell, less the punctuation after it; what was taken out before stays as it is.
_VALUE = re.compile(
    r"\[(?:left out|host)\]|(?!--)(?:(?i:bearer|basic|token)\s+)?"
    r"(?:\"(?:\\.|[^\"\\])*\"|'[^']*'|\S)+?(?=[\"',;.)\]}]{0,8}(?:\s|$))"
)
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_HIDES = re.compile(
    r"apikey|secret|passw(?:or)?d|passphrase|accesskey|privatekey|authtoken|accesstoken|hftoken"
    r"|bearer|credential|^authorization$"
)
_MAY_HIDE = {"token", "key", "pwd", "pass", "auth"}
_SUFFIXES = {"value", "string"}
# Tokens of a vocabulary, tokens that are counted, and keys of columns.
_SHOWS = re.compile(
    r"pad|eos|bos|unk|mask|sep|cls|stop|special|image|audio|video|per|first|next|last|inter"
    r"|sort|group|partition|primary|cache|column|text|input|output|label|prompt"
)
_TELLS_NOTHING = re.compile(
    r"(?i)[\"']?(?:[+-]?\d[\d.,_]*(?:e[+-]?\d+)?(?:[kmgtb%]|[numµ]?s)?"
    r"|true|false|none|null|auto|yes|no|on|off)?[\"']?"
)
_HOSTS = re.compile(r"(?<!g)host|addr|endpoint|(?<!ob)server|(?<!c)url|nodelist")
_PORT = re.compile(r"[\w.-]+(:\d{1,5})")
_USER = re.compile(
    r"(?<=://)[^\s/\"'`<>]+@|(?<![\w./@-])[A-Za-z][\w.+-]{0,60}:[^\s:@/\"']{1,200}@(?!sha\d)(?=[A-Za-z\d])"
)
_KEY = re.compile(
    r"(?<![A-Za-z\d])(?:hf_(?=[a-z]*[A-Z\d])[A-Za-z\d]{10,}|hf_[A-Za-z\d]{16,}|gh[a-z]_[A-Za-z\d]{16,}"
    r"|github_pat_\w{20,}|sk-(?=[\w-]{0,80}[A-Z\d])[\w-]{16,})(?![\w-])"
)


def without_secrets(text: str, mark: str) -> str:
    """Return a text with a mark in place of passwords, keys and tokens, named as such or not."""
    text = _replaced(text, _hides, lambda value: mark)
    text = _USER.sub(f"{mark}@", text)
    return _KEY.sub(mark, text)


def without_hosts(text: str, mark: str) -> str:
    """Return a text with a mark in place of what options name as a host; its port stays."""

    def mark_of(value: str) -> str:
        port = _PORT.fullmatch(value)
        return mark + (port[1] if port else "")

    return _replaced(text, _names_host, mark_of)


def _replaced(
    text: str, judge: Callable[[re.Match[str]], Named], mark_of: Callable[[str], str]
) -> str:
    """Return a text with values replaced; what is no setting may hold one: --env NAME=value."""
    pieces = []
    at = 0
    while found := _SETTING.search(text, at):
        pieces.append(text[at : found.end()])
        at = found.end()
        named = judge(found)
        value = _VALUE.match(text, at) if named != "other" else None
        if value is None or (named == "perhaps" and _TELLS_NOTHING.fullmatch(value[0])):
            continue
        quote = text[found.start() - 1 : found.start()]
        is_quoted = found["equals"] and quote and quote in "\"'"
        # An option that is quoted together with its value ends with the quotes.
        whole = _VALUE.match(text, found.start() - 1) if is_quoted else None
        is_whole = whole is not None and whole.end() > value.end()
        pieces.append(mark_of(value[0]) + (quote if is_whole else ""))
        at = whole.end() if whole and is_whole else value.end()
    return "".join([*pieces, text[at:]])


def _hides(found: re.Match[str]) -> Named:
    """Judge whether a name hides its value."""
    # A file is no name: secret.py:12.
    name = found["option"] or found["bare"].rpartition(".")[2]
    joined = re.sub(r"[._-]", "", name).lower()
    if _HIDES.search(joined):
        return "surely"
    words = [word.lower() for word in _WORDS.findall(name)]
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in _SUFFIXES):
        words.pop()
    if not words or not (words[-1] in _MAY_HIDE or joined.endswith("token")):
        return "other"
    if any(map(_SHOWS.fullmatch, words)):
        return "other"
    return "perhaps" if found["option"] or _is_assigned(found, name, words) else "other"


def _is_assigned(found: re.Match[str], name: str, words: list[str]) -> bool:
    """Tell a name that is given a value from a word of a sentence or of a formula."""
    between = found["between"]
    if between[0] in "\"'\\":
        return True
    if between[0] != "=":
        return "_" in name and between.lstrip()[0] == ":"
    before = found.string[max(0, found.start() - 1) : found.start()]
    return len(words) > 1 or name.isupper() or words == ["token"] or before in ("?", "&")


def _names_host(found: re.Match[str]) -> Named:
    """Judge whether a name says that its value is a host or an address."""
    if found["bare"] and found["between"][0] != "=":
        return "other"
    name = (found["option"] or found["bare"]).lower()
    return "perhaps" if _HOSTS.search(name) else "other"
