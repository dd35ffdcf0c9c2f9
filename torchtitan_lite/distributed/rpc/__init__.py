"""Authenticated remote calls between the processes of one job: calls in JSON with
their server and clients, and state over HTTP.

The secret is never sent. Both sides prove that they have it, each request and each response carries
a MAC (HMAC-SHA256), and a request is accepted once.
"""
