"""How far two ways to the same number may lie apart: every tolerance of the tests, with its reason.

A number here is loosened only with a new reason beside it. What should be equal bit by bit is
compared with `torch.equal`, and has no entry.
"""

PARITY_FLOAT64 = 1e-10
"""Relative, float64. Another mesh adds the same terms in another order: an error of 1e-16 per
addition, some 1e4 additions deep, and Adam divides by small second moments in its first steps."""

PARITY_FLOAT32_LOSS = 1e-6
"""Relative, of a summed loss in float32. Ten times its rounding unit (1.2e-7)."""

PARITY_FLOAT32_NORM = 1e-6
"""Relative, of the gradient's norm in float32: the errors of single gradients, from the order of
the sums in forward and backward, average out. What the norm adds is below 1e-7 (`NORM_FLOAT32`)."""

NORM_FLOAT32 = 1e-7
"""Relative, of the norm of given float32 values, however they are sharded."""

PARITY_BFLOAT16_LOSS = 1e-3
"""Relative, of a loss whose matrix products run in bfloat16 (unit 4e-3): a gradient's sum over
tokens is rounded once on one process and once per rank on several."""

CHUNKED_LOSS_FLOAT64 = 1e-12
"""Absolute and relative. The same formula as F.cross_entropy, with sums cut into chunks."""

CHUNKED_LOSS_FLOAT32 = 2e-5
"""Absolute and relative, of gradients. A weight's gradient adds some 1e2 terms of about 1, each
off by 1e-7."""

CHUNKED_LOSS_BFLOAT16 = 2e-2
"""Relative to the largest element. bfloat16 keeps 8 bits (4e-3); logits and the result are
rounded once each."""

ROPE_FLOAT32 = 1e-6
"""Absolute, of rotated numbers below 1 at positions below 8, whose angles are off by 5e-7 from
rounding; also relative, of the frequencies. It grows with the position: 1e-5 at 64."""

LOGITS_FLOAT32 = 2e-5
"""Absolute, of logits about 1 behind some layers: the same formula in another order of sums."""

LOGITS_FLOAT64 = 1e-6
"""Absolute, of the same in float64. Both sides keep their rotations and angles in float32."""

ATTENTION_FLOAT64 = 1e-12
"""Absolute, of outputs about 1. A masked and a plain call are two kernels with equal terms."""

OPTIMIZER_FLOAT32 = 1e-6
"""Absolute, of weights about 1 after some steps: fused kernels fold multiplications and
additions together."""

SCHEDULE = 1e-12
"""Relative. Python's floats, with the same formula written in another order."""

COUNTED_FLOPS = 1e-9
"""Relative. Both are whole numbers of operations; only their division by the tokens rounds."""

GOLDEN_DIGEST = 1e-4
"""Relative, of a sum over all initial weights. Vector units of other processors round the last bit
of a draw otherwise, which moves the sum by 1e-6; another seed, name or block moves it by 10."""

MOE_FLOAT64 = 1e-12
"""Absolute and relative, of outputs and gradients about 1 to 10: the same products as a loop over
single tokens, added in another order."""

GROUPED_BFLOAT16 = 2e-2
"""Relative to the largest element. Both ways add in float32 and round to bfloat16 (4e-3) once; on
a GPU the kernel may add in parts."""

FLOAT8_LOSS = 2e-2
"""Relative, of the loss of some steps. Products of numbers that keep 3 bits are off by 6 % each,
and a sum of a hundred of random sign by a tenth of that."""

PARITY_FLOAT8_LOSS = 2e-3
"""Relative, of losses after the first step. Weights that differ in float32's last bit may round to
neighbouring float8 numbers, 6 % apart, in one product of hundreds."""

FAULTS_FLOAT64 = 1e-8
"""Relative, float64, of the loss of a step of a run with faults. Replicas that come and go add the
same terms in another order, as another mesh does, and AdamW carries the difference through some
1e2 steps."""

PRETRAINED_LOGITS = 1e-5
"""Absolute, float32, of logits about 1 from the weights of transformers: what is promised of a
conversion. Both sides round the same formula in another order."""

PRETRAINED_GRADIENTS = 2e-5
"""Relative to the largest element of a gradient, float32: sums over some 80 tokens, in another
order."""
