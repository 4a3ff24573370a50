"""A process that starts and answers like a vLLM server, and computes nothing. Run as its interpreter would be.

It writes how it was started beside its log, into `PORT.json`.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

EXTENDED = {"worker_extension_cls": "rollart_weights.RollartWeights"}
ANSWERS = {
    "/health": {},
    "/server_info": {
        "vllm_config": {
            "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 4096},
            "parallel_config": EXTENDED,
        }
    },
}


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send(ANSWERS[self.path.partition("?")[0]])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rows = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
        self._send({"choices": [{"prompt_logprobs": rows}]})

    def _send(self, answer: object) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None: ...


def main() -> None:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    started = {"line": sys.argv[1:], "devices": os.environ.get("CUDA_VISIBLE_DEVICES"), **_side_channel()}
    server = HTTPServer(("127.0.0.1", port), Answers)
    Path(f"{port}.json").write_text(json.dumps(started))
    server.serve_forever()


def _side_channel() -> dict[str, str | None]:
    return {"side_port": os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT")}


if __name__ == "__main__":
    main()
