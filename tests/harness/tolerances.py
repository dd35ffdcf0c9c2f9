"""Every tolerance of the tests, with its reason.

A tolerance may only be increased together with its reason. Values that must be bitwise equal are
compared with `torch.equal` and have no entry.
"""

PARITY_FLOAT64 = 1e-10
"""Relative, float64. Another mesh sums the same terms in another order: an error of 1e-16 per
addition, some 1e4 additions deep, and Adam divides by small second moments in its first steps."""

PARITY_RECURRENT_FLOAT64 = 1e-7
"""The same over ten steps of a tiny Qwen3-Next with weights that transformers draws: norms of heads
divide by outputs of the recurrence that may be near 0, and each step enlarges the difference of the
one before by up to 10."""

PARITY_FLOAT32_LOSS = 1e-6
"""Relative, of a summed loss in float32. Ten times its rounding unit (1.2e-7)."""

RESIZED_FLOAT32_LOSS = 1e-5
"""Relative, of the loss of a step in float32 after some 50 steps on several meshes: ten times
`PARITY_FLOAT32_LOSS`, because AdamW carries the differences of earlier steps on."""

PARITY_FLOAT32_NORM = 1e-6
"""Relative, of the gradient's norm in float32: the errors of single gradients, from the order of
the sums in forward and backward, average out. The norm adds less than 1e-7 (`NORM_FLOAT32`)."""

NORM_FLOAT32 = 1e-7
"""Relative, of the norm of given float32 values, however they are sharded."""

PARITY_BFLOAT16_LOSS = 1e-3
"""Relative, of a loss whose matrix products run in bfloat16 (unit 4e-3): a gradient's sum over
tokens is rounded once on one process and once per rank on several."""

CHUNKED_LOSS_FLOAT64 = 1e-12
"""Absolute and relative. The same formula as F.cross_entropy, with sums split into chunks."""

CHUNKED_LOSS_FLOAT32 = 2e-5
"""Absolute and relative, of gradients. A weight's gradient is a sum of some 1e2 terms of about 1,
each with an error of 1e-7."""

CHUNKED_LOSS_BFLOAT16 = 2e-2
"""Relative to the largest element. bfloat16 keeps 8 bits (4e-3); logits and the result are
rounded once each."""

ROPE_FLOAT32 = 1e-6
"""Absolute, of rotated values below 1 at positions below 8, whose angles have rounding errors of
5e-7; also relative, of the frequencies. It grows with the position: 1e-5 at 64."""

LOGITS_FLOAT32 = 2e-5
"""Absolute, of logits about 1 after some layers: the same formula with sums in another order."""

LOGITS_FLOAT64 = 1e-6
"""Absolute, of logits in float64. Both sides compute rotations and angles in float32."""

MERGED_FLOAT64 = 1e-12
"""Absolute, of logits about 1: W x + B (A x) against (W + B A) x, which rounds otherwise in sums of
some 1e2 terms."""

ATTENTION_FLOAT64 = 1e-12
"""Absolute, of outputs about 1. Calls with and without a mask use two kernels with equal terms."""

OPTIMIZER_FLOAT32 = 1e-6
"""Absolute, of weights about 1 after some steps: fused kernels combine multiplications and
additions."""

NEWTON_SCHULZ_FLOAT64 = 1e-12
"""Absolute, of an orthogonalized matrix with elements below 1: products of matrices against a
singular value decomposition. A step multiplies errors by at most 3.4, five of them by 500."""

SCHEDULE = 1e-12
"""Relative. Python's floats, with the same formula in another order of operations."""

COUNTED_FLOPS = 1e-9
"""Relative. Both are integer numbers of operations; only their division by the tokens rounds."""

GOLDEN_DIGEST = 1e-4
"""Relative, of a sum over all initial weights. Vector units of other processors may round the last
bit of a draw differently, which changes the sum by 1e-6; another seed, name or block changes it by
10."""

MOE_FLOAT64 = 1e-12
"""Absolute and relative, of outputs and gradients about 1 to 10: the same products as in a loop
over single tokens, summed in another order."""

DELTA_FLOAT64 = 1e-12
"""Absolute, of outputs of Gated DeltaNet about 1: a chunk solves a triangular system, a recurrence
adds one position after the other."""

DELTA_FLOAT32 = 1e-5
"""The same in float32, over some hundred positions."""

DELTA_BFLOAT16 = 2e-2
"""Relative to the norm of a layer's output: bfloat16 (4e-3) rounds the results of its projections,
convolution and norm, and float32 holds the state."""

GROUPED_BFLOAT16 = 2e-2
"""Relative to the largest element. Both sides sum in float32 and round to bfloat16 (4e-3) once; on
a GPU the kernel may sum in parts."""

FLOAT8_LOSS = 2e-2
"""Relative, of the loss of some steps. Products of numbers with 3 bits have errors of 6% each,
and a sum of a hundred with random signs a tenth of that."""

PARITY_FLOAT8_LOSS = 2e-3
"""Relative, of losses after the first step. Weights that differ in float32's last bit may round to
neighboring float8 numbers, 6% apart, in one product of hundreds."""

FAULTS_FLOAT64 = 1e-8
"""Relative, float64, of the loss of a step of a run with faults. A changing number of replicas
sums the same terms in another order, as another mesh does, and AdamW propagates the difference
through some 1e2 steps."""

PRETRAINED_LOGITS = 1e-5
"""Relative to the standard deviation of the logits, and absolute of their mean loss, float32, with
the weights of transformers: the documented accuracy of a conversion. Both sides round the same
formula in another order; most of the difference is that of the angles of RoPE, which both compute
in float32."""

PRETRAINED_GRADIENTS = 2e-5
"""Relative to the largest element of a gradient, float32: sums over some 80 tokens, in another
order."""

PRETRAINED_FLOAT64 = 1e-12
"""Relative to the standard deviation of the logits, and absolute of their mean loss, float64, with
transformers' own casts to float32 replaced: sums in another order."""

PRETRAINED_FLOAT64_GRADIENTS = 1e-11
"""Relative to the largest element of a gradient, as above."""

PRETRAINED_DELTA = 5e-4
"""Relative to the standard deviation of the logits and to the largest element of a gradient,
float32, with Gated DeltaNet: norms of heads divide by outputs that may be near 0, and so enlarge
rounding errors. Both sides are that far from float64, in which they agree to 1e-6."""

GPU_FLOAT32_LOSS = 1e-4
"""Relative, of losses of a GPU against a CPU, both in float32 without TF32: other orders of sums in
each layer, which AdamW amplifies over some steps."""

GPU_BFLOAT16_LOSS = 1e-2
"""Relative, of losses in bfloat16 (unit 4e-3) against float32 over some steps."""

GPU_ATTENTION_BFLOAT16 = 2e-2
"""Relative to the norm of the result: inputs, scores and results are rounded to bfloat16 (4e-3)."""
