"""Publication of weights: a run publishes versions, and other jobs subscribe to them.

A version is an immutable snapshot of the model in the ranks' shared memory. A subscriber has a
mesh, layouts and dtypes of its own, and reads only its own boxes. See docs/serving_weights.md.
Reading order: pins, sources, publication, subscriber, hugging_face, vllm_engine; publisher.

Subscribing imports neither torchft nor datasets nor tensorboard.
"""

from torchtitan_lite.serving.publish.hugging_face import hugging_face_targets
from torchtitan_lite.serving.publish.subscriber import Subscriber, Subscription, Target, Update

__all__ = ["Subscriber", "Subscription", "Target", "Update", "hugging_face_targets"]
