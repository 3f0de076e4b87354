"""Outgoing answers: a request's generations as one stream of pieces, put into the OpenAI API's formats."""
