#!/bin/sh
# Ask a question over HTTP while `mmengine serve` runs. Usage: examples/chat.sh [http://localhost:8000]
curl -sS "${1:-http://localhost:8000}/v1/chat/completions" -H 'content-type: application/json' \
  -d '{"messages": [{"role": "user", "content": "What is a triangle?"}], "max_tokens": 32}'
