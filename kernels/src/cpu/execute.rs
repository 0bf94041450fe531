//! What each kind of work does on the CPU, with its operands checked against each other first.
//!
//! The arithmetic is in [`crate::adam`], [`crate::norm`], [`crate::convert`] and [`crate::verdict`]; here is only what
//! turns ranges into slices. What does not fit is [`DeviceError::BadWork`], never a panic.

use half::{bf16, f16};

use crate::adam::{AdamSlices, adam};
use crate::buffer::BufRange;
use crate::convert;
use crate::dtype::{DType, Element};
use crate::error::DeviceError;
use crate::finite;
use crate::lease::{Holds, Operands};
use crate::norm::{self, NormPiece, Partial};
use crate::verdict::{self, RankRecord, Scalars};
use crate::work::{Adam, Cast, FindNonFinite, Fold, NormPartials, Verdict, Work};

/// Evaluates an expression with a type name bound to the Rust type of a [`DType`].
macro_rules! with_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $element = f32;
                $body
            }
            DType::Bf16 => {
                type $element = bf16;
                $body
            }
            DType::F16 => {
                type $element = f16;
                $body
            }
        }
    };
}

/// Does work that is no collective. `holds` are the work's own.
pub(super) fn execute(work: &Work, holds: &mut Holds) -> Result<(), DeviceError> {
    let mut operands = holds.operands(work.name())?;
    match work {
        Work::Fill(w) => with_element!(w.dtype, T => convert::fill(operands.write::<T>(w.dst)?, w.value)),
        Work::Copy(w) => {
            let (src, dst) = (operands.read_bytes(w.src)?, operands.write_bytes(w.dst)?);
            equal("copy", src.len(), dst.len(), "bytes")?;
            dst.copy_from_slice(src);
        }
        Work::Cast(w) => with_element!(w.from, S => with_element!(w.to, D => cast::<S, D>(w, &mut operands)?)),
        Work::FindNonFinite(w) => with_element!(w.dtype, G => find_nonfinite::<G>(w, &mut operands)?),
        Work::Add(w) => {
            let (part, sum) = (operands.read::<f32>(w.part)?, operands.write::<f32>(w.sum)?);
            equal("add", part.len(), sum.len(), "elements")?;
            convert::add(part, sum);
        }
        Work::NormPartials(w) => partials(w, &mut operands)?,
        Work::Fold(w) => fold(w, &mut operands)?,
        Work::Verdict(w) => judge(w, &mut operands)?,
        Work::Adam(w) => match w.param {
            None => with_element!(w.grad_dtype, G => adam_pass::<G, f32>(w, None, &mut operands)?),
            Some((range, dtype)) => {
                with_element!(w.grad_dtype, G => with_element!(dtype, P => adam_pass::<G, P>(w, Some(range), &mut operands)?));
            }
        },
        Work::Collective(_) => return Err(DeviceError::CollectiveOutsideComm),
    }
    Ok(())
}

fn cast<S: Element, D: Element>(work: &Cast, operands: &mut Operands<'_>) -> Result<(), DeviceError> {
    let (src, dst) = (operands.read::<S>(work.src)?, operands.write::<D>(work.dst)?);
    equal("cast", src.len(), dst.len(), "elements")?;
    convert::cast(src, dst);
    Ok(())
}

fn find_nonfinite<G: Element>(work: &FindNonFinite, operands: &mut Operands<'_>) -> Result<(), DeviceError> {
    let grad = operands.read::<G>(work.grad)?;
    inside("non-finite search", &work.pieces, grad.len())?;
    let out = operands.write_bytes(work.out)?;
    equal("non-finite search", Partial::LOCAL_BYTES, out.len(), "bytes")?;
    let found = Partial { local: finite::first_nonfinite(grad, &work.pieces), ..Partial::default() };
    out.copy_from_slice(&found.to_bytes()[Partial::SHARD_BYTES..]);
    Ok(())
}

fn partials(work: &NormPartials, operands: &mut Operands<'_>) -> Result<(), DeviceError> {
    let grad = operands.read::<f32>(work.grad)?;
    inside("norm partials", &work.pieces, grad.len())?;
    let out = operands.write_bytes(work.out)?;
    equal("norm partials", Partial::SHARD_BYTES, out.len(), "bytes")?;
    let partial = norm::partial(work.norm, grad, &work.pieces).scaled(work.norm, work.ratio);
    out.copy_from_slice(&partial.to_bytes()[..Partial::SHARD_BYTES]);
    Ok(())
}

fn inside(work: &'static str, pieces: &[NormPiece], numel: usize) -> Result<(), DeviceError> {
    match pieces.iter().find(|p| p.start > p.end || p.end > numel) {
        None => Ok(()),
        Some(piece) => {
            let reason = format!("piece {}..{} is outside {numel} elements", piece.start, piece.end);
            Err(DeviceError::BadWork { work, reason })
        }
    }
}

fn fold(work: &Fold, operands: &mut Operands<'_>) -> Result<(), DeviceError> {
    let partials = records::<{ Partial::BYTES }>("fold", operands.read_bytes(work.partials)?)?;
    let record = verdict::fold(partials.iter().map(Partial::from_bytes), work.host);
    let out = operands.write_bytes(work.out)?;
    equal("fold", RankRecord::BYTES, out.len(), "bytes")?;
    out.copy_from_slice(&record.to_bytes());
    Ok(())
}

fn judge(work: &Verdict, operands: &mut Operands<'_>) -> Result<(), DeviceError> {
    let ranks = records::<{ RankRecord::BYTES }>("verdict", operands.read_bytes(work.records)?)?;
    let ranks: Vec<_> = ranks.iter().map(RankRecord::from_bytes).collect();
    let bytes = operands.write_bytes(work.scalars)?;
    let Ok(bytes) = <&mut [u8; Scalars::BYTES]>::try_from(bytes) else {
        let reason = format!("{} are {} bytes, not {}", work.scalars, work.scalars.bytes(), Scalars::BYTES);
        return Err(DeviceError::BadWork { work: "verdict", reason });
    };
    let mut scalars = Scalars::from_bytes(bytes);
    let report = verdict::judge(&ranks, &work.rule, &work.scaler, &mut scalars);
    *bytes = scalars.to_bytes();
    work.report.put(work.step, report);
    Ok(())
}

fn adam_pass<G: Element, P: Element>(
    work: &Adam,
    param: Option<BufRange>,
    operands: &mut Operands<'_>,
) -> Result<(), DeviceError> {
    let [scalars] = records::<{ Scalars::BYTES }>("adam", operands.read_bytes(work.scalars)?)? else {
        let reason = format!("{} are {} bytes, not {}", work.scalars, work.scalars.bytes(), Scalars::BYTES);
        return Err(DeviceError::BadWork { work: "adam", reason });
    };
    let scalars = Scalars::from_bytes(scalars);
    let grad = operands.read::<G>(work.grad)?;
    let master = operands.write::<f32>(work.master)?;
    let exp_avg = operands.write::<f32>(work.exp_avg)?;
    let exp_avg_sq = operands.write::<f32>(work.exp_avg_sq)?;
    let mut param = param.map(|range| operands.write::<P>(range)).transpose()?;
    let numel = grad.len();
    for len in [master.len(), exp_avg.len(), exp_avg_sq.len(), param.as_ref().map_or(numel, |p| p.len())] {
        equal("adam", numel, len, "elements")?;
    }
    for segment in work.segments.iter() {
        if segment.start > segment.end || segment.end > numel || segment.group >= work.rows.groups() {
            let reason = format!("{segment:?} does not fit {numel} elements and {} groups", work.rows.groups());
            return Err(DeviceError::BadWork { work: "adam", reason });
        }
    }
    if scalars.skip {
        return Ok(());
    }
    let Some(rows) = work.rows.at(scalars.updates) else {
        let reason = format!("no row for a step that is updated as number {}: {:?}", scalars.updates, work.rows);
        return Err(DeviceError::BadWork { work: "adam", reason });
    };
    let factor = (scalars.factor * work.ratio) as f32;
    for segment in work.segments.iter() {
        let run = segment.start..segment.end;
        let slices = AdamSlices {
            grad: &grad[run.clone()],
            master: &mut master[run.clone()],
            exp_avg: &mut exp_avg[run.clone()],
            exp_avg_sq: &mut exp_avg_sq[run.clone()],
            param: param.as_mut().map(|p| &mut p[run]),
        };
        adam(&rows[segment.group], factor, slices);
    }
    Ok(())
}

/// Bytes as records of one size, without a rest.
fn records<'a, const N: usize>(work: &'static str, bytes: &'a [u8]) -> Result<&'a [[u8; N]], DeviceError> {
    match bytes.as_chunks::<N>() {
        (records, []) => Ok(records),
        _ => Err(DeviceError::BadWork { work, reason: format!("{} bytes are not records of {N}", bytes.len()) }),
    }
}

fn equal(work: &'static str, a: usize, b: usize, what: &str) -> Result<(), DeviceError> {
    if a == b {
        return Ok(());
    }
    Err(DeviceError::BadWork { work, reason: format!("{a} and {b} {what}, which must be equal") })
}
