"""Which of a model's prompts belongs to which type of input."""

import pytest

from serve_app.embedding.options import prompt_names


@pytest.mark.parametrize(
    ("prompts", "query", "document", "classification", "clustering"),
    [
        ({}, "", "", "", ""),
        ({"query": "q: "}, "query", "", "", ""),  # Snowflake's
        ({"query": "q: ", "passage": "p: "}, "query", "passage", "", ""),
        ({"query": "q: ", "passage": "", "document": ""}, "query", "document", "", ""),
        (
            dict.fromkeys(["search_query", "search_document", "classification", "clustering"], "x"),  # nomic's
            *("search_query", "search_document", "classification", "clustering"),
        ),
        (
            dict.fromkeys(["retrieval.query", "retrieval.passage", "separation", "classification"], "x"),  # Jina's
            *("retrieval.query", "retrieval.passage", "classification", "separation"),
        ),
        (
            dict.fromkeys(["query", "document", "Retrieval-query", "Clustering", "Classification"], "x"),  # Gemma's
            *("query", "document", "Classification", "Clustering"),
        ),
    ],
)
def test_usual_names(prompts, query, document, classification, clustering):
    found = prompt_names(prompts)
    assert {found["search_query"], found["query"]} == {query}
    assert {found["search_document"], found["document"], found["passage"]} == {document}
    assert (found["classification"], found["clustering"]) == (classification, clustering)
