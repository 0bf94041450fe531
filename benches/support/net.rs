//! A model that computes by spinning: every unit has one bf16 parameter with bf16 gradients, and that is a bucket.

use gatherflow::{ChunkId, Config, DType, Engine, Error, Model, ParamId, ParamOptions, Rank, UnitId};

use crate::spin::Spin;

/// Elements of a bucket: few, so that the runtime's own work, which two busy cores cannot hide, is small beside the compute.
pub(crate) const NUMEL: usize = 8 << 10;

pub(crate) struct Net {
    pub(crate) chunk: ChunkId,
    pub(crate) units: Vec<(UnitId, ParamId)>,
    pub(crate) spin: Spin,
}

impl Net {
    pub(crate) fn start(rank: Rank, config: Config, buckets: usize, spin: Spin) -> Result<(Engine, Self), Error> {
        let mut model = Model::new();
        let chunk = model.chunk();
        let mut units = Vec::new();
        let options = ParamOptions { grad_dtype: Some(DType::Bf16), ..ParamOptions::default() };
        for i in 0..buckets {
            let unit = model.unit(chunk, format!("unit {i}"))?;
            let param = model.param_with(unit, format!("p{i}"), &[NUMEL], DType::Bf16, options.clone())?;
            units.push((unit, param));
        }
        let engine = Engine::new(rank, model, config, |_, memory| memory.fill_with(|_| 0.5))?;
        Ok((engine, Self { chunk, units, spin }))
    }
}
