"""A task set as anybody writes one with verifiers, with two rewards, a metric, and a harness of two turns."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import verifiers.v1 as vf


class SumsConfig(vf.TasksetConfig):
    most: int = 19
    """Largest number."""


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, task: SumData, trace: vf.Trace) -> dict[str, float]:
        return {"brief": float(len(trace.last_reply) <= len(task.answer))}

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterator[Sum]:
        side = self.config.most + 1
        for n in range(side * side):
            a, b = divmod(n, side)
            yield Sum(SumData(prompt=f"{a}+{b}=", answer=str(a + b), name=f"sum-{n}"), self.config.task)


class AsksAgain(vf.Harness[vf.HarnessConfig]):
    """Says what the policy answered back to it, and takes its second answer. Its loop runs in this process."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            for _ in range(2):
                answer = await client.post(
                    f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages}
                )
                answer.raise_for_status()
                messages.append(answer.json()["choices"][0]["message"])
                messages.append({"role": "user", "content": data.prompt})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["AsksAgain", "Sums"]
