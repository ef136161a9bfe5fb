from __future__ import annotations

import ast
import builtins
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UPSTREAM = {
    "accelerate",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "huggingface_hub",
    "hydra",
    "jsonargparse",
    "lightning",
    "liger_kernel",
    "omegaconf",
    "peft",
    "safetensors",
    "tokenizers",
    "torch",
    "torchmetrics",
    "transformers",
    "trl",
    "verifiers",
    "vllm",
    "gymnasium",
    "mcp",
    "antlr4",
    "rich",
    "tensorboard",
    "wandb",
    "mlflow",
    "trackio",
}


def private(name):
    return name.startswith("_") and not name.startswith("__")


def aliases(tree):
    found = {}
    for n in ast.walk(tree):
        if isinstance(n, ast.Import):
            for a in n.names:
                found[a.asname or a.name.split(".")[0]] = a.name if a.asname else a.name.split(".")[0]
        elif isinstance(n, ast.ImportFrom) and n.module and not n.level:
            for a in n.names:
                found[a.asname or a.name] = f"{n.module}.{a.name}"
    return found


def dotted(n, names):
    parts = []
    while isinstance(n, ast.Attribute):
        parts.append(n.attr)
        n = n.value
    if isinstance(n, ast.Name) and n.id in names:
        return ".".join([names[n.id], *reversed(parts)])
    return None


def up(path):
    return path is not None and path.split(".")[0] in UPSTREAM


def own_names():
    own = set()
    for f in (ROOT / "lit_rl").rglob("*.py"):
        for n in ast.walk(ast.parse(f.read_text())):
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                own.add(n.name)
            elif (
                isinstance(n, ast.Attribute)
                and isinstance(n.ctx, ast.Store)
                and isinstance(n.value, ast.Name)
                and n.value.id in ("self", "cls")
            ):
                own.add(n.attr)
            elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                own.add(n.id)
            elif isinstance(n, ast.arg):
                pass
    return own


def scan():
    own = own_names()
    for f in sorted((ROOT / "lit_rl").rglob("*.py")):
        tree = ast.parse(f.read_text())
        names = aliases(tree)
        where = str(f.relative_to(ROOT))
        for n in ast.walk(tree):
            if isinstance(n, ast.ImportFrom) and n.module and not n.level:
                for a in n.names:
                    p = f"{n.module}.{a.name}"
                    if up(p) and any(map(private, p.split("."))):
                        yield where, n.lineno, "private", p
            elif isinstance(n, ast.Attribute):
                p = dotted(n, names)
                if private(n.attr):
                    if up(p):
                        yield where, n.lineno, "private", p
                    elif n.attr not in own and not (p and not up(p)):
                        yield where, n.lineno, "private", "." + n.attr
                    elif p and not up(p) and not p.startswith("lit_rl"):
                        yield where, n.lineno, "std?", p
                if isinstance(n.ctx, ast.Store):
                    if up(p):
                        yield where, n.lineno, "patch", p
                    elif n.attr == "forward":
                        yield where, n.lineno, "patch", ".forward"
            elif isinstance(n, ast.Call):
                fn = ast.unparse(n.func)
                if (
                    fn in ("getattr", "hasattr", "setattr", "delattr")
                    and len(n.args) > 1
                    and isinstance(n.args[1], ast.Constant)
                    and private(str(n.args[1].value))
                    and n.args[1].value not in own
                ):
                    yield where, n.lineno, "private", "." + n.args[1].value
                if fn == "setattr" and up(dotted(n.args[0], names)):
                    yield where, n.lineno, "patch", ast.unparse(n)
                if fn in ("inspect.signature", "signature", "inspect.unwrap"):
                    yield where, n.lineno, "signature", ast.unparse(n)
                if isinstance(n.func, ast.Attribute) and n.func.attr == "register" and up(dotted(n.func, names)):
                    yield where, n.lineno, "patch", dotted(n.func, names)


if __name__ == "__main__":
    for u in scan():
        print(*u)
