"""Reranking with litellm, by the routes of two of its providers: Jina's `/v1/rerank` and vLLM's `/rerank`."""

import os

import pytest

# Use the table of prices that the package contains, and do not fetch it.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

import server

DOCUMENTS = ["lazy dog", "river stone light", "quick fox quick fox", "stone"]


@pytest.fixture(scope="module")
def url():
    reranker = os.environ.get("BATON_RERANKER")
    server.need(reranker, "scripts/run-clients.sh writes the reranker")
    with server.serve("--model", reranker, "--name", "tiny") as banner:
        yield server.base_url(banner).removesuffix("/v1")


@pytest.fixture(params=["jina_ai", "hosted_vllm"])
def to(request, url):
    return {"model": f"{request.param}/tiny", "api_base": url, "api_key": "none", "timeout": 120}


def test_documents_come_back_in_the_order_of_their_scores(to):
    reply = litellm.rerank(**to, query="brown fox", documents=DOCUMENTS, return_documents=True)
    scores = [result["relevance_score"] for result in reply.results]
    assert len(scores) == 4 and scores == sorted(scores, reverse=True) and scores[0] > scores[-1]
    assert sorted(result["index"] for result in reply.results) == [0, 1, 2, 3]
    assert all(result["document"]["text"] == DOCUMENTS[result["index"]] for result in reply.results)
    best = litellm.rerank(**to, query="brown fox", documents=DOCUMENTS, top_n=2)
    assert [r["index"] for r in best.results] == [r["index"] for r in reply.results[:2]]


def test_a_mistake_is_named(to):
    with pytest.raises(Exception, match="must not be empty"):
        litellm.rerank(**to, query="", documents=DOCUMENTS)
