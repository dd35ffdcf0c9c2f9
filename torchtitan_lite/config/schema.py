"""The root of the configuration. Layer: above schema."""

from torchtitan_lite.schema.activation_checkpoint import ActivationCheckpointConfig
from torchtitan_lite.schema.anomalies import AnomaliesConfig
from torchtitan_lite.schema.checkpoint import CheckpointConfig
from torchtitan_lite.schema.comm import CommConfig
from torchtitan_lite.schema.compile import CompileConfig
from torchtitan_lite.schema.debug import DebugConfig
from torchtitan_lite.schema.experimental import ExperimentalConfig
from torchtitan_lite.schema.fault_tolerance import FaultToleranceConfig
from torchtitan_lite.schema.job import JobConfig
from torchtitan_lite.schema.lora import LoRAConfig
from torchtitan_lite.schema.lr_scheduler import LRSchedulerConfig
from torchtitan_lite.schema.memory_estimation import MemoryEstimationConfig
from torchtitan_lite.schema.metrics import MetricsConfig
from torchtitan_lite.schema.model import ModelConfig
from torchtitan_lite.schema.optimizer import OptimizerConfig
from torchtitan_lite.schema.parallelism import ParallelismConfig
from torchtitan_lite.schema.profiling import ProfilingConfig
from torchtitan_lite.schema.publish import PublishConfig
from torchtitan_lite.schema.quantize import QuantizeConfig
from torchtitan_lite.schema.section import Section
from torchtitan_lite.schema.training import TrainingConfig
from torchtitan_lite.schema.validation import ValidationConfig


class Config(Section):
    """The configuration of a run."""

    job: JobConfig = JobConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    validation: ValidationConfig = ValidationConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: LRSchedulerConfig = LRSchedulerConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    activation_checkpoint: ActivationCheckpointConfig = ActivationCheckpointConfig()
    compile: CompileConfig = CompileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    anomalies: AnomaliesConfig = AnomaliesConfig()
    publish: PublishConfig = PublishConfig()
    comm: CommConfig = CommConfig()
    metrics: MetricsConfig = MetricsConfig()
    profiling: ProfilingConfig = ProfilingConfig()
    debug: DebugConfig = DebugConfig()
    memory_estimation: MemoryEstimationConfig = MemoryEstimationConfig()
    experimental: ExperimentalConfig = ExperimentalConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    lora: LoRAConfig = LoRAConfig()
