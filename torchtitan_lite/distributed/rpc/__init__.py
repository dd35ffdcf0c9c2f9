"""Authenticated remote calls between the processes of one job: sessions over a shared secret, and a
gRPC server and clients that use them.

The secret is never sent. Both sides prove that they have it, each request and each response carries
a MAC (HMAC-SHA256), and a request is accepted once.
"""
