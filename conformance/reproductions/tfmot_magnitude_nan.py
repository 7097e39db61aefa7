import tensorflow as tf
import tf_keras as keras
from tensorflow_model_optimization.sparsity.keras import (
    ConstantSparsity,
    UpdatePruningStep,
    prune_low_magnitude,
)

dense = keras.layers.Dense(
    1, input_shape=(2,), kernel_initializer=tf.constant_initializer([float("nan"), 1.0])
)
model = prune_low_magnitude(
    keras.Sequential([dense]), ConstantSparsity(0.5, begin_step=1)
)
model.compile("sgd", "mse")
model.fit(tf.ones((1, 2)), tf.ones((1, 1)), verbose=0, callbacks=[UpdatePruningStep()])
assert (mask := model.layers[0].pruning_vars[0][1].numpy().tolist()) == [[0], [1]], mask
