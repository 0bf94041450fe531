//! What each kind of work does to memory, and what does not fit.

use half::{bf16, f16};

use super::*;
use crate::adam::{AdamRow, AdamRows};
use crate::norm::{NormPiece, NormType, Partial};
use crate::verdict::{
    Average, HostVerdict, OnNonFinite, RankRecord, Report, Scalars, ScalerRule, Spoiled, VerdictRule,
};
use crate::work::{Adam, AdamSegment, Add, Cast, FindNonFinite, Fold, NormPartials, Verdict};

/// Runs inline.
fn run(device: &Arc<dyn Device>, work: Work) -> Result<(), DeviceError> {
    device.enqueue(crate::StreamId(0), work)
}

#[test]
fn fills_casts_copies_and_additions_do_so() {
    let device = alone(None);
    let [a, b, c] = [16, 8, 8].map(|bytes| device.alloc(bytes, &[]).unwrap());
    write(&device, a.whole(), &[1.0_f32, -2.5, f32::INFINITY, 1e-9]);
    let cast = |src, from, dst, to| Work::Cast(Cast { src, from, dst, to });
    run(&device, cast(a.whole(), DType::F32, b.whole(), DType::Bf16)).unwrap();
    assert_eq!(read::<bf16>(&device, b.whole())[..3], [1.0, -2.5, f32::INFINITY].map(bf16::from_f32));
    run(&device, cast(b.whole(), DType::Bf16, c.whole(), DType::F16)).unwrap();
    assert_eq!(read::<f16>(&device, c.whole())[..2], [1.0, -2.5].map(f16::from_f32));
    run(&device, Work::Fill(Fill { dst: c.range(4, 8), dtype: DType::F16, value: 0.5 })).unwrap();
    run(&device, copy(c.range(4, 8), b.range(0, 4))).unwrap();
    assert_eq!(read::<f16>(&device, b.range(0, 4)), [f16::from_f32(0.5); 2]);
    write(&device, c.whole(), &[0.5_f32, 1e8]);
    run(&device, Work::Add(Add { part: a.range(0, 8), sum: c.whole() })).unwrap();
    assert_eq!(read::<f32>(&device, c.whole()), [1.5, 1e8 - 2.5]);
}

struct Step {
    opened: Opened,
    grad: Buffer,
    partial: Buffer,
    records: Buffer,
    scalars: Buffer,
    state: [Buffer; 3],
    param: Buffer,
}

const NUMEL: usize = 6;

impl Step {
    fn new(world: &Arc<LocalWorld>, rank: usize) -> Self {
        let opened = opened(world, rank, None);
        let alloc = |bytes| opened.device.alloc(bytes, &[]).unwrap();
        let [grad, a, b, c] = [(); 4].map(|()| alloc(4 * NUMEL));
        let (partial, scalars, param) = (alloc(Partial::BYTES), alloc(Scalars::BYTES), alloc(2 * NUMEL));
        let records = alloc(RankRecord::BYTES * world.ranks());
        Self { grad, partial, records, scalars, state: [a, b, c], param, opened }
    }

    /// Norm, fold, the small all-gather, verdict and Adam on two streams; returns the report.
    fn run(&mut self, seq: u64, host: HostVerdict) -> crate::verdict::StepReport {
        let Opened { device, comm } = &mut self.opened;
        let (rank, ranks) = (comm.rank(), comm.world());
        let optimizer = device.stream(StreamKind::Optimizer).unwrap();
        let reduce = device.stream(StreamKind::Reduce).unwrap();
        let piece = NormPiece { start: 0, end: NUMEL - 1, param: 4, counted: true };
        let norm = NormPartials {
            grad: self.grad.whole(),
            norm: NormType::default(),
            pieces: [piece].into(),
            ratio: 1.0,
            out: self.partial.range(0, Partial::SHARD_BYTES),
        };
        device.enqueue(reduce, Work::NormPartials(norm)).unwrap();
        let mine = self.records.range(rank * RankRecord::BYTES, (rank + 1) * RankRecord::BYTES);
        device.enqueue(reduce, Work::Fold(Fold { partials: self.partial.whole(), host, out: mine })).unwrap();
        comm.issue(reduce, all_gather(seq, &self.records, rank, ranks)).unwrap();
        device.wait(optimizer, &device.record(reduce)).unwrap();
        let report = Report::new();
        let rule = VerdictRule {
            average: Average::Ranks(ranks),
            norm: NormType::default(),
            max_norm: 0.0,
            on_nonfinite: OnNonFinite::Skip,
        };
        let verdict = Verdict {
            records: self.records.whole(),
            rule,
            scaler: ScalerRule::None,
            scalars: self.scalars.whole(),
            report: report.clone(),
            step: seq,
        };
        device.enqueue(optimizer, Work::Verdict(verdict)).unwrap();
        let adam = Adam {
            grad: self.grad.whole(),
            grad_dtype: DType::F32,
            master: self.state[0].whole(),
            exp_avg: self.state[1].whole(),
            exp_avg_sq: self.state[2].whole(),
            param: Some((self.param.whole(), DType::Bf16)),
            scalars: self.scalars.whole(),
            ratio: 1.0,
            segments: [AdamSegment { start: 0, end: NUMEL - 1, group: 0 }].into(),
            rows: AdamRows::new(1, 1, [AdamRow::new(0.5, (0.9, 0.999), 1e-8, 0.0, false, seq + 1)]),
        };
        device.enqueue(optimizer, Work::Adam(adam)).unwrap();
        done(&device.record(optimizer));
        report.take(seq).unwrap()
    }
}

#[test]
fn a_step_goes_from_gradients_to_parameters_and_a_spoiled_one_nowhere() {
    let world = LocalWorld::new(2, None).unwrap();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let world = &world;
            scope.spawn(move || {
                let mut step = Step::new(world, rank);
                let device = step.opened.device.clone();
                let initial = Scalars::initial(&ScalerRule::None).to_bytes();
                let mut lease = device.lease(step.scalars.whole(), AccessMode::Write).unwrap();
                lease.as_mut_bytes().unwrap().copy_from_slice(&initial);
                drop(lease);
                write(&device, step.grad.whole(), &[3.0_f32, 0.0, 0.0, 0.0, 4.0, 9.0]);
                let spoiled = (rank == 1).then_some(Spoiled::Abandoned { param: 2 });
                let report = step.run(0, HostVerdict { spoiled, ..HostVerdict::default() });
                assert!(!report.updated);
                assert_eq!(report.spoiled, Some((1, Spoiled::Abandoned { param: 2 })));
                assert_eq!(read::<f32>(&device, step.state[0].whole()), [0.0; NUMEL]);
                let report = step.run(1, HostVerdict::default());
                assert!(report.updated);
                // Two ranks with norm 5 each, averaged over two.
                let norm = report.grad_norm.unwrap();
                assert!((norm - 50.0_f64.sqrt() / 2.0).abs() < 1e-6, "{norm}");
                assert_eq!(report.zeros, Some(6));
                let master = read::<f32>(&device, step.state[0].whole());
                assert!(master[0] < -0.1 && master[4] < -0.1, "{master:?}");
                assert_eq!(master[1..4], [0.0; 3]);
                assert_eq!(master[5], 0.0, "padding is in no segment");
                let param: Vec<_> = master.iter().map(|&x| bf16::from_f32(x)).collect();
                assert_eq!(read::<bf16>(&device, step.param.whole()), param);
            });
        }
    });
}

#[test]
fn work_that_does_not_fit_is_named() {
    let adam = |b: &Buffer, end, group, first| {
        let at = |i: usize| b.range(8 * i, 8 * i + 8);
        Work::Adam(Adam {
            grad: at(0),
            grad_dtype: DType::F32,
            master: at(1),
            exp_avg: at(2),
            exp_avg_sq: at(3),
            param: None,
            scalars: b.range(64, 64 + Scalars::BYTES),
            ratio: 1.0,
            segments: [AdamSegment { start: 0, end, group }].into(),
            rows: AdamRows::new(first, 1, [AdamRow::new(0.5, (0.9, 0.999), 1e-8, 0.0, false, 1)]),
        })
    };
    let norm = |b: &Buffer, end, out| {
        let piece = NormPiece { start: 0, end, param: 0, counted: true };
        Work::NormPartials(NormPartials {
            grad: b.range(0, 8),
            norm: NormType::default(),
            pieces: [piece].into(),
            ratio: 1.0,
            out,
        })
    };
    let search = |b: &Buffer, end, out| {
        let piece = NormPiece { start: 0, end, param: 0, counted: true };
        Work::FindNonFinite(FindNonFinite { grad: b.range(0, 8), dtype: DType::F32, pieces: [piece].into(), out })
    };
    let verdict = |records, scalars| {
        let rule = VerdictRule {
            average: Average::Ranks(1),
            norm: NormType::default(),
            max_norm: 0.0,
            on_nonfinite: OnNonFinite::Skip,
        };
        Work::Verdict(Verdict { records, rule, scaler: ScalerRule::None, scalars, report: Report::new(), step: 0 })
    };
    let b = alone(None).alloc(1024, &[]).unwrap();
    let host = HostVerdict::default();
    let misfits = [
        copy(b.range(0, 8), b.range(8, 12)),
        copy(b.range(0, 8), b.range(4, 12)),
        Work::Cast(Cast { src: b.range(0, 8), from: DType::F32, dst: b.range(8, 16), to: DType::F16 }),
        norm(&b, 3, b.range(8, 8 + Partial::SHARD_BYTES)),
        Work::Add(Add { part: b.range(0, 8), sum: b.range(8, 12) }),
        norm(&b, 2, b.range(8, 12)),
        search(&b, 3, b.range(8, 8 + Partial::LOCAL_BYTES)),
        search(&b, 2, b.range(8, 12)),
        Work::Fold(Fold { partials: b.range(0, 5), host, out: b.range(64, 64 + RankRecord::BYTES) }),
        Work::Fold(Fold { partials: b.range(0, Partial::BYTES), host, out: b.range(64, 65) }),
        verdict(b.range(0, RankRecord::BYTES + 1), b.range(512, 512 + Scalars::BYTES)),
        verdict(b.range(0, RankRecord::BYTES), b.range(512, 513)),
        adam(&b, 3, 0, 0),
        adam(&b, 2, 1, 0),
        adam(&b, 2, 0, 1),
    ];
    for work in misfits {
        let device = alone(None);
        device.alloc(1024, &[]).unwrap();
        match run(&device, work.clone()) {
            Err(DeviceError::BadWork { work: name, reason }) => {
                assert!(name == work.name() && !reason.contains("panic"), "{name}: {reason}");
            }
            other => panic!("{work:?}: {other:?}"),
        }
    }
    for (work, misaligned) in
        [(fill(b.range(2, 6), 0.0), true), (fill(b.range(0, 6), 0.0), true), (fill(b.range(1020, 1028), 0.0), false)]
    {
        let device = alone(None);
        device.alloc(1024, &[]).unwrap();
        let error = run(&device, work).unwrap_err();
        assert_eq!(matches!(error, DeviceError::Lease(crate::LeaseError::Misaligned { .. })), misaligned, "{error}");
        assert!(matches!(error, DeviceError::Lease(_)));
    }
}
