"""The HTTP front: OpenAI requests in, one prefill and one decode worker chosen for each, text out."""
