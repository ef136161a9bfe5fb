"""Secrets, recognised by the form of a text or by the name of the key that holds it, and their redaction.

The check of what is typed and the redaction of what is written read the same tables.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

REDACTED = "<redacted>"

TOKEN_FORMS = {
    "a token of the Hugging Face hub": r"hf_[A-Za-z0-9]{20,}",
    "an API key (sk-...)": r"sk-(?=[\w-]{0,60}?(?:[A-Za-z0-9_]{16}|[0-9a-f]{8}-[0-9a-f]{4}-))[\w-]{20,}",
    "an API key of a model's provider": r"(?:(?:xai-|pplx-|gsk_|r8_)[A-Za-z0-9]{30,}|nvapi-[\w-]{40,})",
    "a token of GitHub": r"(?:gh[oprsu]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,})",
    "a token of GitLab": r"gl(?:pat|ptt|dt|rt|ft|cbt)-[\w-]{16,}",
    "a token of Slack": r"xox[abeoprs]-[\w-]{16,}",
    "an access key of AWS": r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])",
    "an API key of Google": r"AIza[\w-]{30,}",
    "a key of Stripe": r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    "a JSON web token": r"eyJ[\w-]{6,4096}\.eyJ[\w-]{6,4096}\.[\w-]{6,}",
    "a key of W&B": r"(?:wandb_v\d_\w{20,}|local-[0-9a-f]{40}(?![0-9a-f]))",
}
"""Tokens that are recognised by their first letters and are long enough to be real, by their name in a message."""

_QUERY = (
    r"(?:key|sig|signature|token|secret|password|passwd|pwd|x-(?:amz|goog)-[\w-]+"
    r"|(?:api|access|auth|client|id|private|refresh|secret|security|session|subscription)[_-]?(?:key|token|secret))"
)
_BASE64 = r"(?=[A-Za-z0-9+/]{0,60}?(?:[0-9=]|(?:[a-z]{1,60}[A-Z]{1,60}){2}))[A-Za-z0-9+/]{12,}=*"
"""Base64 with digits or capitals within, which words of a language do not have."""
CONTEXT_FORMS = {
    "a password in an address": r"://((?:\$\{[^{}]*\}|[^\s/?#@:$])*:(?!\$\{)[^\s/?#@]+@)",
    "a token in an address": r"https?://([\w-]{20,}@)",
    "a key in the query of an address": rf"(?i:[?&]{_QUERY}=)((?!\$\{{)[^&#\s'\"]+)",
    "a Bearer token": r"\b(?i:bearer) ((?=\S*\d|\S{16})[\w./+=~-]{8,})",
    "a password of HTTP's Basic": rf"\b(?i:basic) ({_BASE64})",
    "a header of HTTP": r"(?im:^(?:(?:proxy-)?authorization|x-auth[\w-]*|x-api-key)) ?: ?((?![^\r\n]*\$\{)\S[^\r\n]*)",
    "a private key": r"(?s:(-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)))",
}
"""Secrets that are recognised by the text around them; the group is the secret. A reference in its place is none."""

_OWN_WORDS = {what: re.compile(rf"(?<![\w./-]){form}(?![\w/-]|\.\w)") for what, form in TOKEN_FORMS.items()}
"""Tokens in typed text, where a part of a path is none."""
_IN_TEXTS = {what: re.compile(form) for what, form in CONTEXT_FORMS.items()}
_HIDDEN = [*_IN_TEXTS.values(), re.compile(rf"\b({'|'.join(TOKEN_FORMS.values())})")]
_COMMIT = re.compile(r"\b([0-9a-f]{40})\b")
"""40 hexadecimal digits, which were a key of W&B, too. So typing them is not refused."""

SECRET_NAMES = (
    *("token", "api_key", "apikey", "access_key", "secret_key", "private_key", "signing_key", "account_key", "secret"),
    *("password", "passwd", "passphrase", "pwd", "credential", "authorization", "cookie"),
)
"""Endings of keys that hold a secret, after an underscore or a hyphen; several of them with an s."""
_NAME = re.compile(
    rf"(?i)(?:^|_)(?:{'|'.join(SECRET_NAMES)})s?$|^x_auth(?:_|$)"
    r"|(?:^|_)(?:db|user|admin|root|smtp|ftp|http|proxy|sql|mysql|pg|postgres|redis|mongo|ssh|login)_?pass$|^pass$"
)
_TOKENS_OF_TEXTS = re.compile(
    r"(?i)(?:^|_)(?:[bep]os|pad|unk|sep|cls|mask|image|video|audio|vision|stop|start|end|begin|special|think|thinking"
    r"|tool|new|first|last|next|per|eot|eom)_token$|(?<!api)(?<!auth)(?<!access)(?<!hf)(?<!hub)_tokens$"
)
_NO_SECRET = re.compile(
    r"|\?\?\?|null|none|true|false|auto|<.*>|\[.*\]|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*_(?:KEY|TOKEN|SECRET|PASSWORD)"
)
"""No secret under any name: nothing, YAML's words, tokens of a vocabulary, names of environment variables."""
_COUNT = re.compile(r"[\d_]+")
_ASSIGNED = re.compile(r"(?<![\w-])([\w-]{1,64})=")
"""The form of messages and command lines: `password=...`."""
_WORD = re.compile(r"\S*")


def secret_in(text: str) -> str | None:
    """Return the kind of secret in a text that a user typed, by its form: a key of `TOKEN_FORMS` or `CONTEXT_FORMS`;
    None where it holds no secret."""
    forms = {**_OWN_WORDS, **_IN_TEXTS}
    return next((what for what, form in forms.items() if form.search(text)), None)


def is_secret_name(key: str, value: object) -> bool:
    """Tell whether a value is a secret by the name of its key.

    Args:
        key: Its own name, without those of the groups around it; Hydra's `+` and the hyphens of an option may be there.
        value: A reference (`${...}`) is no secret, nor is a count; numbers are passwords and keys alone.
    """
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key.lstrip("+~-")).replace("-", "_")
    if not _NAME.search(name) or _TOKENS_OF_TEXTS.search(name) or isinstance(value, bool | float | None):
        return False
    if isinstance(value, int):
        return re.search(r"(?i)pass|pwd|key", name) is not None
    text = str(value).strip("'\"")
    if name.lower() == "tokens" and _COUNT.fullmatch(text):
        return False
    return "${" not in text and not _NO_SECRET.fullmatch(text)


def redact_text(text: str, *, commits: bool = False) -> str:
    """Return the text with every secret of a known form replaced.

    Args:
        commits: Leave 40 hexadecimal digits: they are a commit.
    """
    for form in _HIDDEN if commits else (*_HIDDEN, _COMMIT):
        text = form.sub(_redact_group, text)
    parts, at = [], 0
    for name in _ASSIGNED.finditer(text):
        if name.start() < at or not is_secret_name(name[1], "any"):
            continue
        value = _WORD.match(text, name.end())
        if value and is_secret_name(name[1], value[0]):
            parts += [text[at : name.end()], REDACTED]
            at = value.end()
    return "".join([*parts, text[at:]])


def _redact_group(match: re.Match[str]) -> str:
    begins, ends = match.start(1) - match.start(), match.end(1) - match.start()
    return f"{match[0][:begins]}{REDACTED}{match[0][ends:]}"


def redact_command(command: str) -> str:
    """Redact the words of a command line as a config is: `group.key=value` by the names of its key, and a value with a
    secret in it as a whole."""
    return shlex.join(_redact_word(*word.partition("=")) for word in shlex.split(command))


def _redact_word(key: str, equals: str, value: str) -> str:
    if not equals:
        return redact(key)
    name = key.partition("@")[0].rpartition(".")[2]
    if value[:1] not in ("{", "["):
        return key + equals + redact(value, name)
    try:
        # Hydra needs no blank behind the colon of a dictionary, YAML does. What is no YAML then is hidden as a whole.
        tree = yaml.safe_load(re.sub(r":(?! )", ": ", value))
    except yaml.YAMLError:
        return f"{key}{equals}{REDACTED}"
    clean = (
        redact(tree, name) == tree and redact_text(value, commits=True) == value
    )  # an address is whole in `value` alone
    return f"{key}{equals}{value if clean else REDACTED}"


def redact(node: Any, key: str = "") -> Any:
    """Return the tree with everything replaced that is a secret by its name or its form."""
    if isinstance(node, dict):
        return {name: redact(value, str(name)) for name, value in node.items()}
    if isinstance(node, list):
        return [redact(value, key) for value in node]
    if is_secret_name(key, node):
        return REDACTED
    return redact_text(node, commits=key.endswith("revision")) if isinstance(node, str) else node
