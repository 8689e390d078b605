#!/usr/bin/env bash
# openai 3.57.0: stream().get_final_response() raises for a response that its limit has cut.
# anthropic 2.14.0: messages.create() takes no temperature, top_p or top_k.
#
# A stream of /v1/responses ends with `response.completed`, or with `response.incomplete` where
# max_output_tokens cut it. The helper of the client keeps the first alone: of the second it says
# that no response was completed, though it read all of it. Without the helper the event is there.
#
# The client of Anthropic's API, whose server reads temperature, has no argument for it any more:
# whoever wants the most probable text passes it by extra_body.
#
# Seen: RuntimeError for a cut response with a text, none for a completed one; of the three names
# none is an argument.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openai==3.57.0 anthropic==2.14.0
"$folder/venv/bin/python" - <<'PY'
import inspect
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import anthropic
import openai

TEXT = {"type": "output_text", "text": "In the beginning", "annotations": []}


def events(status):
    item = {"id": "m", "type": "message", "role": "assistant", "content": [TEXT], "status": status}
    body = {"id": "r", "object": "response", "created_at": 0, "model": "m", "tools": [],
            "tool_choice": "auto", "parallel_tool_calls": True}  # fmt: skip
    yield {"type": "response.created", "response": {**body, "status": "in_progress", "output": []}}
    at = {"output_index": 0}
    begun = {**item, "status": "in_progress", "content": []}
    yield {"type": "response.output_item.added", **at, "item": begun}
    yield {"type": "response.output_item.done", **at, "item": item}
    yield {"type": f"response.{status}", "response": {**body, "status": status, "output": [item]}}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for number, event in enumerate(events(asked["input"])):
            event["sequence_number"] = number
            self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}", api_key="none")
seen = {}
for status in ("completed", "incomplete"):
    with client.responses.stream(model="m", input=status) as stream:
        try:
            seen[status] = stream.get_final_response().output_text
        except RuntimeError as error:
            seen[status] = str(error)
    *_, last = client.responses.create(model="m", input=status, stream=True)
    assert last.response.output_text == TEXT["text"]
print("openai", openai.__version__, seen)
assert seen["completed"] == TEXT["text"]
assert "response.completed" in seen["incomplete"]
arguments = inspect.signature(anthropic.Anthropic(api_key="none").messages.create).parameters
found = [name for name in ("temperature", "top_p", "top_k") if name in arguments]
print("anthropic", anthropic.__version__, "of temperature, top_p and top_k it takes", found)
assert not found and "extra_body" in arguments
PY
echo "as it was found"
