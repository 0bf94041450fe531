//! Parameters in plain memory: what an engine does for the operations, without an engine.

use std::sync::Arc;

use half::{bf16, f16};
use parking_lot::Mutex;

use super::super::access::{ParamAccess, Values};
use super::super::forward::Forward;
use crate::actors::{DType, ParamId, UnitId};
use crate::error::Error;
use crate::guard::WriteMode;

/// What operations did, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Did {
    Entered(u32),
    Left(u32),
    Wrote(u32),
}

#[derive(Debug)]
struct Stored {
    shape: Vec<usize>,
    f32: Vec<f32>,
    bf16: Vec<bf16>,
    f16: Vec<f16>,
    dtype: DType,
    trainable: bool,
    grad: Vec<f32>,
    written: bool,
}

#[derive(Debug)]
pub(super) struct Memory {
    params: Mutex<Vec<Stored>>,
    log: Mutex<Vec<Did>>,
    pub(super) trains: bool,
    pub(super) broken: Option<ParamId>,
}

impl Memory {
    pub(super) fn new() -> Self {
        Self { params: Mutex::default(), log: Mutex::default(), trains: true, broken: None }
    }

    pub(super) fn param(&self, shape: &[usize], values: &[f32], dtype: DType, trainable: bool) -> ParamId {
        assert_eq!(shape.iter().product::<usize>(), values.len());
        let mut params = self.params.lock();
        params.push(Stored {
            shape: shape.to_vec(),
            f32: values.to_vec(),
            bf16: values.iter().map(|x| bf16::from_f32(*x)).collect(),
            f16: values.iter().map(|x| f16::from_f32(*x)).collect(),
            dtype,
            trainable,
            // What is left of an earlier step must not matter.
            grad: vec![f32::NAN; values.len()],
            written: false,
        });
        ParamId(params.len() as u32 - 1)
    }

    pub(super) fn forward(self: &Arc<Self>) -> Forward {
        Forward::over(Arc::clone(self) as Arc<dyn ParamAccess>)
    }

    pub(super) fn gradient(&self, param: ParamId) -> Vec<f32> {
        self.params.lock()[param.0 as usize].grad.clone()
    }

    pub(super) fn log(&self) -> Vec<Did> {
        self.log.lock().clone()
    }

    pub(super) fn start_step(&self) {
        self.log.lock().clear();
        self.params.lock().iter_mut().for_each(|param| param.written = false);
    }

    fn check(&self, param: ParamId) -> Result<(), Error> {
        if self.broken == Some(param) {
            Err(Error::misuse(format!("parameter {} is out of reach", param.0)))
        } else {
            Ok(())
        }
    }
}

impl ParamAccess for Memory {
    fn enter(&self, unit: UnitId) -> Result<(), Error> {
        self.log.lock().push(Did::Entered(unit.0));
        Ok(())
    }

    fn leave(&self, unit: UnitId) -> Result<(), Error> {
        self.log.lock().push(Did::Left(unit.0));
        Ok(())
    }

    fn trains(&self) -> bool {
        self.trains
    }

    fn describe(&self, param: ParamId) -> Result<(Vec<usize>, bool), Error> {
        let params = self.params.lock();
        let stored = &params[param.0 as usize];
        Ok((stored.shape.clone(), stored.trainable))
    }

    fn read(&self, param: ParamId, reader: &mut dyn FnMut(Values<'_>)) -> Result<(), Error> {
        self.check(param)?;
        let params = self.params.lock();
        let stored = &params[param.0 as usize];
        reader(match stored.dtype {
            DType::Bf16 => Values::Bf16(&stored.bf16),
            DType::F16 => Values::F16(&stored.f16),
            _ => Values::F32(&stored.f32),
        });
        Ok(())
    }

    fn grad(&self, param: ParamId, writer: &mut dyn FnMut(WriteMode, &mut [f32])) -> Result<(), Error> {
        self.check(param)?;
        let mut params = self.params.lock();
        let stored = &mut params[param.0 as usize];
        assert!(stored.trainable, "a frozen parameter has no gradient");
        let mode = if stored.written { WriteMode::Accumulate } else { WriteMode::Overwrite };
        writer(mode, &mut stored.grad);
        stored.written = true;
        self.log.lock().push(Did::Wrote(param.0));
        Ok(())
    }
}
