//! A model written down as TOML, for `gatherflow plan`, and a GPT-like one made from three numbers.

use std::collections::HashMap;

use serde::Deserialize;

use super::{GroupId, Model, ModelError, ShardGroup, ShardGroupId};
use crate::actors::{Across, DType, SumOver};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    chunk: Vec<Chunk>,
    #[serde(default)]
    shard_group: Vec<ShardGroups>,
    #[serde(default)]
    group: Vec<Group>,
}

/// An optimizer group. What is left out comes from the configuration.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    name: String,
    #[serde(default)]
    lr: Option<f64>,
    #[serde(default = "one")]
    lr_multiplier: f64,
    #[serde(default)]
    betas: Option<(f64, f64)>,
    #[serde(default)]
    eps: Option<f64>,
    #[serde(default)]
    weight_decay: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ShardGroups {
    name: String,
    ranks: usize,
    /// Whether the groups beside it hold other parameters, not replicas.
    #[serde(default)]
    experts: bool,
    #[serde(default)]
    average_over: Option<usize>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Chunk {
    unit: Vec<Unit>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unit {
    name: String,
    #[serde(default)]
    params: Vec<Param>,
    /// Names of parameters that earlier units registered.
    #[serde(default)]
    uses: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Param {
    name: String,
    shape: Vec<usize>,
    dtype: String,
    #[serde(default)]
    grad_dtype: Option<String>,
    #[serde(default = "yes")]
    trainable: bool,
    #[serde(default)]
    shared: Option<String>,
    #[serde(default)]
    shared_embedding: bool,
    /// Nothing, or `model_parallel`.
    #[serde(default)]
    sum_over: Option<String>,
    #[serde(default)]
    tensor_parallel: bool,
    #[serde(default)]
    shard_group: Option<String>,
    /// An optimizer group by name.
    #[serde(default)]
    group: Option<String>,
}

fn one() -> f64 {
    1.0
}

fn yes() -> bool {
    true
}

impl Model {
    /// Reads a model description.
    ///
    /// ```
    /// let model = gatherflow::Model::from_toml(r#"
    ///     [[chunk]]
    ///     [[chunk.unit]]
    ///     name = "embed"
    ///     params = [{ name = "embed.table", shape = [256, 64], dtype = "bf16" }]
    ///     [[chunk.unit]]
    ///     name = "head"
    ///     params = [{ name = "head.bias", shape = [256], dtype = "f32", trainable = false }]
    ///     uses = ["embed.table"]
    /// "#)?;
    /// assert_eq!(model.params().len(), 2);
    /// # Ok::<(), gatherflow::ModelError>(())
    /// ```
    ///
    /// # Errors
    /// [`ModelError`] names the line, parameter, dtype or shape that is wrong.
    pub fn from_toml(text: &str) -> Result<Self, ModelError> {
        let description: Description = toml::from_str(text)
            .map_err(|e| ModelError::Description { reason: e.to_string().trim_end().to_owned() })?;
        let mut model = Self::new();
        let mut shard_groups = HashMap::new();
        for ShardGroups { name, ranks, experts, average_over } in description.shard_group {
            let across = if experts { Across::Experts } else { Across::Replicas };
            let id = model.shard_group(ShardGroup { name: name.clone(), ranks, across, average_over });
            shard_groups.insert(name, id);
        }
        let mut groups = HashMap::new();
        for Group { name, lr, lr_multiplier, betas, eps, weight_decay } in description.group {
            groups.insert(name, model.group(super::Group { lr, lr_multiplier, betas, eps, weight_decay })?);
        }
        for chunk in description.chunk {
            let id = model.chunk();
            for unit in chunk.unit {
                let unit_id = model.unit(id, unit.name)?;
                for param in unit.params {
                    let parse = |dtype: &String| {
                        let unsupported =
                            || ModelError::UnsupportedDType { name: param.name.clone(), dtype: dtype.clone() };
                        DType::parse(dtype).ok_or_else(unsupported)
                    };
                    let unknown = |what: &str, name: &String| ModelError::Description {
                        reason: format!("parameter `{}` names {what} `{name}`, which is not declared", param.name),
                    };
                    let shard_group =
                        |name: &String| shard_groups.get(name).copied().ok_or_else(|| unknown("shard group", name));
                    let group = |name: &String| groups.get(name).copied().ok_or_else(|| unknown("group", name));
                    let sum_over = match param.sum_over.as_deref() {
                        None => SumOver::Nothing,
                        Some("model_parallel") => SumOver::ModelParallel,
                        Some(other) => {
                            let reason =
                                format!("parameter `{}`: sum_over is `{other}`, not `model_parallel`", param.name);
                            return Err(ModelError::Description { reason });
                        }
                    };
                    let dtype = parse(&param.dtype)?;
                    let options = super::ParamOptions {
                        grad_dtype: param.grad_dtype.as_ref().map(parse).transpose()?,
                        trainable: param.trainable,
                        shared: param.shared,
                        shared_embedding: param.shared_embedding,
                        tensor_parallel: param.tensor_parallel,
                        sum_over,
                        shard_group: param.shard_group.as_ref().map_or(Ok(ShardGroupId::ALL), shard_group)?,
                        group: param.group.as_ref().map_or(Ok(GroupId::DEFAULT), group)?,
                    };
                    model.param_with(unit_id, param.name, &param.shape, dtype, options)?;
                }
                for name in unit.uses {
                    let param = model.find(&name).ok_or_else(|| ModelError::Description {
                        reason: format!("`uses` names `{name}`, which no earlier unit registers"),
                    })?;
                    model.use_param(unit_id, param)?;
                }
            }
        }
        Ok(model)
    }

    /// The shapes of a GPT with tied embeddings: token and position tables, `layers` blocks (attention and feed-forward
    /// halves are units of their own), a final norm. 16-bit weights, f32 norms and biases.
    ///
    /// # Errors
    /// [`ModelError::BadShape`] where a number is 0 or too large.
    pub fn gpt(layers: usize, width: usize, vocab: usize, context: usize) -> Result<Self, ModelError> {
        let mut model = Self::new();
        let chunk = model.chunk();
        let embed = model.unit(chunk, "embed")?;
        let table = model.param(embed, "embed.tokens", &[vocab, width], DType::Bf16)?;
        model.param(embed, "embed.positions", &[context, width], DType::Bf16)?;
        let wide = |factor: usize| width.saturating_mul(factor);
        for layer in 0..layers {
            for (half, first, second) in [("attn", wide(3), width), ("ffn", wide(4), wide(4))] {
                let name = format!("block{layer}.{half}");
                let unit = model.unit(chunk, name.as_str())?;
                model.param(unit, format!("{name}.norm.gamma"), &[width], DType::F32)?;
                model.param(unit, format!("{name}.norm.beta"), &[width], DType::F32)?;
                model.param(unit, format!("{name}.in.weight"), &[first, width], DType::Bf16)?;
                model.param(unit, format!("{name}.in.bias"), &[first], DType::F32)?;
                model.param(unit, format!("{name}.out.weight"), &[width, second], DType::Bf16)?;
                model.param(unit, format!("{name}.out.bias"), &[width], DType::F32)?;
            }
        }
        let head = model.unit(chunk, "head")?;
        model.param(head, "head.norm.gamma", &[width], DType::F32)?;
        model.param(head, "head.norm.beta", &[width], DType::F32)?;
        model.use_param(head, table)?;
        Ok(model)
    }
}
