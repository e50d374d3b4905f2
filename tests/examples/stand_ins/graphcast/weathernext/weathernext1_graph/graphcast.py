"""Three graph networks: from the grid to a mesh, on the mesh, and back."""

import dataclasses
import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import xarray

TARGET_ATMOSPHERIC_VARS = ("temperature",)
_TARGETS = ("2m_temperature", *TARGET_ATMOSPHERIC_VARS)


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    input_variables: tuple[str, ...]
    target_variables: tuple[str, ...]
    forcing_variables: tuple[str, ...]
    pressure_levels: tuple[int, ...]
    input_duration: str


TASK_13 = TaskConfig(
    input_variables=(*_TARGETS, "day_progress_sin", "land_sea_mask"),
    target_variables=_TARGETS,
    forcing_variables=("day_progress_sin",),
    pressure_levels=(500, 850, 1000),
    input_duration="12h",
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    resolution: float
    mesh_size: int
    latent_size: int
    gnn_msg_steps: int
    hidden_layers: int
    radius_query_fraction_edge_length: float


@dataclasses.dataclass(frozen=True)
class CheckPoint:
    params: dict
    model_config: ModelConfig
    task_config: TaskConfig
    description: str
    license: str


class GraphNet(hk.Module):
    """Embeds the nodes of a graph, passes messages along its edges, and embeds results."""

    def __init__(self, config, steps, embed_nodes=False, outputs=None, *, name):
        super().__init__(name=name)
        self.config, self.steps = config, steps
        self.embed_nodes, self.outputs = embed_nodes, outputs

    def __call__(self, nodes, edges, senders, receivers):
        """`nodes`: by the name of their set, of which receivers are the last one's."""
        networks = self._networks_builder(nodes)
        edges = networks["encoder_edges"](edges)
        if self.embed_nodes:
            nodes = {name: networks[f"encoder_nodes_{name}"](x) for name, x in nodes.items()}
        first, last = list(nodes)[0], list(nodes)[-1]
        for step in range(self.steps):
            ends = edges, nodes[first][senders], nodes[last][receivers]
            edges = edges + networks[f"processor_edges_{step}"](*ends)
            messages = jax.ops.segment_sum(edges, receivers, len(nodes[last]))
            moved = networks[f"processor_nodes_{step}_{last}"](nodes[last], messages)
            nodes = nodes | {last: nodes[last] + moved}
        return networks["decoder_nodes"](nodes[last]) if self.outputs else nodes

    def _networks_builder(self, nodes):
        size, hidden = self.config.latent_size, self.config.hidden_layers

        def build(name, outputs=size, norm=True):
            mlp = hk.nets.MLP(
                [size] * hidden + [outputs], name=f"{name}_mlp", activation=jax.nn.silu
            )
            stages = [mlp]
            if norm:
                stages.append(hk.LayerNorm(-1, True, True, name=f"{name}_layer_norm"))
            return lambda *args: hk.Sequential(stages)(jnp.concatenate(args, -1))

        last = list(nodes)[-1]
        found = {"encoder_edges": build("encoder_edges_" + self.name.removesuffix("_gnn"))}
        if self.embed_nodes:
            found |= {f"encoder_nodes_{name}": build(f"encoder_nodes_{name}") for name in nodes}
        for step in range(self.steps):
            found[f"processor_edges_{step}"] = build(f"processor_edges_{step}")
            name = f"processor_nodes_{step}_{last}"
            found[name] = build(name)
        if self.outputs:
            found["decoder_nodes"] = build("decoder_nodes", self.outputs, norm=False)
        return found


class GraphCast:
    def __init__(self, model_config, task_config):
        self.config, net = model_config, functools.partial(GraphNet, model_config)
        atmospheric = len(task_config.pressure_levels)
        outputs = [
            atmospheric if n in TARGET_ATMOSPHERIC_VARS else 1 for n in task_config.target_variables
        ]
        self.to_mesh = net(1, embed_nodes=True, name="grid2mesh_gnn")
        self.on_mesh = net(model_config.gnn_msg_steps, name="mesh_gnn")
        self.to_grid = net(1, outputs=sum(outputs), name="mesh2grid_gnn")

    def loss_and_predictions(self, inputs, targets, forcings):
        predictions = self(inputs, targets, forcings)
        pairs = zip(jax.tree.leaves(predictions), jax.tree.leaves(targets), strict=True)
        loss = sum(jnp.square(x - y).mean(tuple(range(1, x.ndim))) for x, y in pairs)
        return loss, predictions

    def __call__(self, inputs, targets, forcings):
        grid = points_of(inputs.coords["lat"], inputs.coords["lon"])
        mesh = grid[:: 4 // self.config.mesh_size + 2]
        features = jnp.concatenate([channels(inputs), channels(forcings)], -1)
        of_mesh = jnp.zeros((len(mesh), *features.shape[1:]), features.dtype)
        of_mesh = of_mesh.at[..., :3].set(mesh[:, None].astype(features.dtype))
        nodes = self.to_mesh(
            {"grid_nodes": features, "mesh_nodes": of_mesh}, *edges_of(grid, mesh, features.dtype)
        )
        on_mesh = self.on_mesh(
            {"mesh_nodes": nodes["mesh_nodes"]}, *edges_of(mesh, mesh, features.dtype)
        )
        found = self.to_grid(
            {"mesh_nodes": on_mesh["mesh_nodes"], "grid_nodes": nodes["grid_nodes"]},
            *edges_of(mesh, grid, features.dtype),
        )
        return dataset_of(found, targets)


def points_of(lat, lon):
    """Points of the unit sphere, `[points, 3]`."""
    a, b = np.meshgrid(np.deg2rad(lat), np.deg2rad(lon), indexing="ij")
    return np.stack([np.cos(a) * np.cos(b), np.cos(a) * np.sin(b), np.sin(a)], -1).reshape(-1, 3)


def edges_of(senders, receivers, dtype):
    """Edges from the three nearest points: their four features, senders and receivers."""
    away = np.linalg.norm(receivers[:, None] - senders[None], axis=-1)
    nearest = np.argsort(away, axis=1, kind="stable")[:, :3]
    ends = nearest.reshape(-1), np.repeat(np.arange(len(receivers)), 3)
    offset = receivers[ends[1]] - senders[ends[0]]
    features = np.concatenate([offset, np.linalg.norm(offset, axis=-1, keepdims=True)], -1)
    return jnp.asarray(features[:, None], dtype), *ends


def channels(dataset):
    """All variables of the points, `[points, batch, channels]`."""
    sizes = {"batch": 1, **dataset.sizes}
    points = len(dataset.coords["lat"]) * len(dataset.coords["lon"])
    found = []
    for name in sorted(dataset.data_vars):
        dims, x = dataset.data_vars[name]
        if "batch" not in dims:
            dims, x = ("batch", *dims), x[None]
        if "lat" not in dims:
            x = jnp.broadcast_to(x[..., None], (*x.shape, points))
        found.append(jnp.moveaxis(x.reshape(sizes["batch"], -1, points), 2, 0))
    return jnp.concatenate(found, -1)


def dataset_of(found, template):
    """Takes `[points, batch, channels]` apart into variables of a template's shapes."""
    variables, start = {}, 0
    for name in sorted(template.data_vars):
        dims, x = template.data_vars[name]
        count = int(np.prod(x.shape[1:-2]))
        part = jnp.moveaxis(found[..., start : start + count], 0, 2)
        variables[name], start = (dims, part.reshape(x.shape)), start + count
    return xarray.Dataset(variables, template.coords)
