"""The perplexity of a text, as llama.cpp's llama-perplexity computes it, from the log-probabilities of Baton's echo:

    perplexity.py URL MODEL TEXT_FILE N_CTX

The text is cut into windows of N_CTX tokens, and the tokens of each window's second half are scored. Prints the perplexity
and the number of scored tokens.
"""

import json
import math
import sys
import urllib.request


def post(url, body):
    call = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(call, timeout=600) as reply:
        return json.load(reply)


def main():
    url, model, file, n_ctx = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    with open(file, encoding="utf-8") as text:
        body = {"model": model, "content": text.read(), "add_special": True, "parse_special": False}
    tokens = post(f"{url}/tokenize", body)["tokens"]
    # A model that begins texts with a token does so in each window: it takes the place of the window's first token.
    begins = post(f"{url}/tokenize", {"model": model, "content": "", "add_special": True})["tokens"]
    scores = []
    for start in range(0, len(tokens) - n_ctx + 1, n_ctx):
        window = begins[:1] + tokens[start : start + n_ctx][len(begins[:1]) :]
        body = {"model": model, "prompt": window, "echo": True, "logprobs": 0, "max_tokens": 0}
        choice = post(f"{url}/v1/completions", body)["choices"][0]
        scores += choice["logprobs"]["token_logprobs"][n_ctx // 2 + 1 : n_ctx]
    mean = sum(scores) / len(scores)
    print(f"{math.exp(-mean):.4f} over {len(scores)} tokens")


main()
