"""OpenVINO GenAI as a process of its own, run by the environment that `ggraph bench install
openvino` makes: nothing of ours but `answering` is imported here.

It chooses by itself: eight bits for keys and values and for what products multiply. Its GGUF reader
knows Llama and Qwen, F16, Q8_0, Q4_0, Q4_1, Q4_K and Q6_K. Not for users.
"""

import sys
from typing import Any

import numpy as np

from .answering import Serve, answer

try:
    import openvino
    import openvino_genai
except ImportError:  # not in its own environment
    openvino = openvino_genai = None


class Pipeline:
    """One model, greedy."""

    def __init__(self, path: str, threads: int) -> None:
        if openvino_genai is None:
            raise RuntimeError("openvino-genai is not installed")
        wanted = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        caching = openvino_genai.SchedulerConfig()
        caching.enable_prefix_caching = False  # a prompt that is measured again is read again
        self._pipe = openvino_genai.LLMPipeline(path, "CPU", scheduler_config=caching, **wanted)
        self._lengths: set[int] = set()

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request, read whole, and its timings; what its length makes compile is in none."""
        ids, new = request["ids"], request["new"]
        if len(ids) not in self._lengths:
            self._lengths.add(len(ids))
            self._run(ids, 1)
        tokens, first, whole = self._run(ids, new)
        return {
            "text": "", "ids": tokens, "prompt_n": len(ids), "prompt_ms": first,
            "predicted_n": len(tokens), "predicted_ms": whole - first,
        }  # fmt: skip

    def _run(self, ids: list[int], new: int) -> tuple[list[int], float, float]:
        """Tokens, milliseconds to the first of them and to the last."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = new, True
        config.do_sample = config.apply_chat_template = False
        found = self._pipe.generate(openvino.Tensor(np.array([ids], np.int64)), config)
        seen = found.perf_metrics
        return list(found.tokens[0]), seen.get_ttft().mean, seen.get_generate_duration().mean


def main() -> None:
    """`python -m models.bench.peer_openvino MODEL THREADS CONTEXT`; the last is its own."""
    path, threads, _ = sys.argv[1:]

    def opened() -> tuple[str, Serve]:
        pipeline = Pipeline(path, int(threads))
        return str(openvino.__version__), pipeline.serve

    answer(opened, f"openvino cannot open {path}")


if __name__ == "__main__":
    main()
