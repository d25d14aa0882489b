"""Ray Serve LLM with an engine that is not there. Runs in an environment of its own: see `environment.py`.

    python -m benchmarks.relay.ray_serve_llm PORT [--direct]

Its own ingress, server, batcher and router, with their defaults; one replica of each, as ours has.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.relay.steps import Steps, chunk, step_of

MODEL = "fake"
ENGINE = "benchmarks.relay.ray_serve_llm.FakeEngine"
ROOM = 1000
"""Requests that may run at once: more than are sent."""


class FakeEngine:
    """What Ray Serve LLM asks of an engine, as far as chats need it.

    Not derived from Ray's protocol: that would import Ray, which must not happen before its settings are made.
    """

    def __init__(self, llm_config: object) -> None:
        self._steps = Steps()

    async def start(self) -> None: ...

    async def check_health(self) -> None: ...

    def routing_stats(self) -> dict[str, object]:
        return {}

    async def chat(self, request: Any, raw_request_info: object = None) -> AsyncIterator[str]:
        """`request` is vLLM's. Strings are what an engine yields to Ray Serve LLM."""
        async for data in self._tokens(request):
            yield data.decode()

    async def build_asgi_app(self) -> object:
        """For direct streaming, where the engine's own HTTP side answers. It reads bodies as vLLM's does."""
        from fastapi import FastAPI
        from fastapi.responses import StreamingResponse
        from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest

        app = FastAPI()

        async def chat(request: ChatCompletionRequest) -> StreamingResponse:
            return StreamingResponse(self._tokens(request), media_type="text/event-stream")

        async def models() -> dict[str, object]:
            return {"object": "list", "data": [{"id": MODEL}]}

        # Words of annotations are looked up in the module, where these names are not.
        chat.__annotations__ = {"request": ChatCompletionRequest}
        models.__annotations__ = {}
        app.add_api_route("/v1/chat/completions", chat, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", models, methods=["GET"])
        return app

    async def _tokens(self, request: Any) -> AsyncIterator[bytes]:
        step_s = step_of({"vllm_xargs": request.vllm_xargs})
        for position in range(request.max_tokens):
            if position:
                await self._steps.wait(step_s)
            yield chunk(position)
        yield b"data: [DONE]\n\n"


def application(checkpoint: Path, *, direct: bool) -> Any:
    from ray.serve.llm import LLMConfig, build_openai_app

    replica = {"num_replicas": 1, "max_ongoing_requests": ROOM, "ray_actor_options": {"num_cpus": 0.2}}
    config = LLMConfig(
        model_loading_config={"model_id": MODEL, "model_source": str(checkpoint)},
        accelerator_type=None,
        deployment_config=replica,
        placement_group_config={"bundles": [{"CPU": 1}]},
    )
    # In direct streaming there is no ingress deployment.
    ingress = {} if direct else {"ingress_deployment_config": {**replica, "autoscaling_config": None}}
    return build_openai_app({"llm_configs": [config], **ingress})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--direct", action="store_true")
    args = parser.parse_args()
    os.environ |= {"RAYLLM_VLLM_ENGINE_CLS": ENGINE, "RAY_USAGE_STATS_ENABLED": "0"}
    if args.direct:
        os.environ |= {"RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"}
        os.environ |= {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3"}
    import ray
    from ray import serve

    with tempfile.TemporaryDirectory() as folder:
        # All that is read of a checkpoint where no engine loads it.
        (Path(folder) / "config.json").write_text(
            json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
        )
        ray.init(address="local", num_cpus=4, log_to_driver=False, namespace="serve")
        try:
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": args.port})
            serve.run(application(Path(folder), direct=args.direct))
            signal.signal(signal.SIGINT, signal.default_int_handler)  # Ray has put its own in its place
            signal.pause()
        except KeyboardInterrupt:
            pass
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]  # Ray does not type it
            ray.shutdown()


if __name__ == "__main__":
    main()
