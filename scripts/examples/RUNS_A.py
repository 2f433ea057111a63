"""Overrides that train each example for a few steps, without network."""

MNIST = [
    "data=synthetic",
    "data.image_size=28",
    "data.dataset.channels=1",
    "data.dataset.samples=128",
    "data.batch_size=16",
]

RUNS = {
    "mnist": [*MNIST, "epochs=2"],
    "mnist_rnn": [*MNIST, "epochs=2"],
    "mnist_forward_forward": [
        *(*MNIST, "epochs=2", "freeze=['1@1ep']", "scheduler.first.options.step_size=1", "evaluate.every_epochs=1")
    ],
    "siamese_network": [
        "data.dataset.source._target_=runner.data.sources.digits.digits",
        *("~data.dataset.source.root", "~data.dataset.source.download", "data.batch_size=8", "evaluate.batch_size=64"),
        *("epochs=2", "limit.train_batches=5", "limit.eval_batches=2", "data.num_workers=0"),
    ],
    "vae": [*MNIST, "epochs=2"],
    "regression": ["epochs=2", "data.dataset.samples=320"],
    "gcn": ["data=drawn_graph", "model.in_features=32", "epochs=12", "evaluate.every_epochs=4"],
    "denoising_autoencoder": ["epochs=2", "limit.train_batches=6"],
}
