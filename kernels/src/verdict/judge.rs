//! Partials to a record, records to the verdict. The same records give the same bits on every rank.

use super::{Average, HostVerdict, OnNonFinite, RankRecord, Scalars, ScalerRule, Spoiled, StepReport, VerdictRule};
use crate::norm::Partial;

/// Added to the norm in the clip factor (SPEC T3).
const CLIP_EPSILON: f64 = 1e-6;

/// The largest gradient for Adam, averaged, unscaled and clipped: 2^63. Its square is a quarter of what an f32 can hold, and that
/// quarter is room for what rounding adds to the second moment's running mean over any number of steps, and for coupled weight
/// decay.
const LARGEST: f64 = (1_u64 << 63) as f64;

/// One rank's record from its buckets' partials, which come in plan order, and what only its host knows. Where the host does not
/// spoil the step, the first parameter found non-finite before the reduction does.
pub fn fold(partials: impl IntoIterator<Item = Partial>, host: HostVerdict) -> RankRecord {
    let mut record = RankRecord { host, ..RankRecord::default() };
    for partial in partials {
        record.sum_powers += partial.sum_powers;
        record.max_abs = record.max_abs.max(partial.max_abs);
        record.zeros = record.zeros.wrapping_add(partial.zeros);
        record.nonfinite = record.nonfinite.or(partial.nonfinite);
        if partial.largest > record.largest {
            (record.largest, record.largest_in) = (partial.largest, partial.largest_in);
        }
        record.host.spoiled = record.host.spoiled.or(partial.local.map(|param| Spoiled::NonFinite { param }));
    }
    record
}

/// The step's verdict from all ranks' records, which come in rank order: leaves factor, skip flag and the next step's loss
/// scale in `scalars`, and tells the host.
///
/// The step is skipped if any rank spoils it, if any gradient is not finite, if the weights add up to nothing, or if hosts differ in
/// what they must set alike. A gradient whose absolute value exceeds 2^63 once it is averaged, unscaled and clipped counts as one
/// that is not finite: its square would not stay finite in the second moment (SPEC T6). So does a factor that f32 cannot hold
/// ([`crate::norm::Partial::LEAST`]), and a norm that f64 cannot. Only a step that ends on its gradients' merits (updated, or
/// skipped because they are not finite) moves the scaler: a spoiled step's gradients say nothing about the scale.
///
/// Weights are the caller's to check: they are not negative and not NaN. `scalars` are [`Scalars::initial`] or those of the
/// step before.
pub fn judge(records: &[RankRecord], rule: &VerdictRule, scaler: &ScalerRule, scalars: &mut Scalars) -> StepReport {
    let job = Job::of(records);
    let loss_scale = match *scaler {
        ScalerRule::None => 1.0,
        ScalerRule::Constant { scale } => scale,
        ScalerRule::Dynamic { .. } => scalars.scale,
    };
    scalars.scale = loss_scale;

    let spoiled = first(records, |record| record.host.spoiled);
    let average = match rule.average {
        Average::Ranks(ranks) => Some(1.0 / ranks as f64),
        Average::Weight => reciprocal(job.weight),
    };
    let scaled = average.map(|average| {
        let unscale = 1.0 / f64::from(loss_scale);
        let norm = rule.norm.of(job.sum_powers, job.max_abs) * average * unscale;
        (norm, average * unscale * clip_factor(rule.max_norm, norm))
    });
    let too_large = |record: &RankRecord| {
        let (norm, factor) = scaled?;
        (record.largest * factor > LARGEST || !norm.is_finite()).then_some(record.largest_in)
    };
    let nonfinite = first(records, |record| record.nonfinite).or_else(|| first(records, too_large));
    let unlike = records.iter().position(|record| record.host.alike != records[0].host.alike);
    if spoiled.is_none() && unlike.is_none() && average.is_some() {
        scalars.move_scale(scaler, nonfinite.is_some());
    }

    let mut report = StepReport {
        updated: false,
        grad_norm: None,
        zeros: None,
        loss_scale,
        next_loss_scale: scalars.scale,
        nonfinite,
        spoiled,
        nonfinite_is_error: nonfinite.is_some()
            && *scaler == ScalerRule::None
            && rule.on_nonfinite == OnNonFinite::Error,
        no_weight: average.is_none(),
        unlike,
        stop: records.iter().any(|record| record.host.stop),
    };
    match scaled {
        Some((norm, factor)) if nonfinite.is_none() && spoiled.is_none() && unlike.is_none() => {
            scalars.factor = factor;
            scalars.skip = false;
            scalars.updates += 1;
            report.updated = true;
            report.grad_norm = Some(norm);
            report.zeros = Some(job.zeros);
        }
        _ => {
            scalars.factor = 0.0;
            scalars.skip = true;
        }
    }
    report
}

/// What is summed over ranks, in rank order.
struct Job {
    sum_powers: f64,
    max_abs: f64,
    zeros: u64,
    weight: f64,
}

impl Job {
    fn of(records: &[RankRecord]) -> Self {
        records.iter().fold(Self { sum_powers: 0.0, max_abs: 0.0, zeros: 0, weight: 0.0 }, |job, record| Self {
            sum_powers: job.sum_powers + record.sum_powers,
            max_abs: job.max_abs.max(record.max_abs),
            zeros: job.zeros.wrapping_add(record.zeros),
            weight: job.weight + record.host.weight,
        })
    }
}

/// The first rank that has something to tell, and what.
fn first<T>(records: &[RankRecord], tell: impl Fn(&RankRecord) -> Option<T>) -> Option<(usize, T)> {
    records.iter().enumerate().find_map(|(rank, record)| tell(record).map(|told| (rank, told)))
}

/// `1 / weight`, unless the weight is nothing: 0, or so little that the quotient is no f32.
fn reciprocal(weight: f64) -> Option<f64> {
    let average = 1.0 / weight;
    (weight > 0.0 && (average as f32).is_finite()).then_some(average)
}

/// SPEC T3.
fn clip_factor(max_norm: f64, norm: f64) -> f64 {
    if max_norm > 0.0 { (max_norm / (norm + CLIP_EPSILON)).min(1.0) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp)] // bits are promised
    use super::*;
    use crate::norm::NormType;

    const RANKS: VerdictRule = VerdictRule {
        average: Average::Ranks(2),
        norm: NormType::P(2.0),
        max_norm: 0.0,
        on_nonfinite: OnNonFinite::Skip,
    };
    const DYNAMIC: ScalerRule =
        ScalerRule::Dynamic { initial: 8.0, min: 1.0, growth: 2.0, backoff: 0.5, interval: 2, hysteresis: 1 };

    fn tiny(initial: f32) -> ScalerRule {
        ScalerRule::Dynamic { initial, min: 1e-38, growth: 2.0, backoff: 0.5, interval: 2, hysteresis: 1 }
    }

    fn record(sum_powers: f64) -> RankRecord {
        RankRecord { sum_powers, ..RankRecord::default() }
    }

    fn weighing(sum_powers: f64, weight: f64) -> RankRecord {
        RankRecord { host: HostVerdict { weight, ..HostVerdict::default() }, ..record(sum_powers) }
    }

    fn spoiled(spoiled: Spoiled) -> RankRecord {
        RankRecord { host: HostVerdict { spoiled: Some(spoiled), ..HostVerdict::default() }, ..record(1.0) }
    }

    fn judged(records: &[RankRecord], rule: &VerdictRule, scaler: &ScalerRule) -> (Scalars, StepReport) {
        let mut scalars = Scalars::initial(scaler);
        let report = judge(records, rule, scaler, &mut scalars);
        (scalars, report)
    }

    #[test]
    fn shards_fold_in_plan_order() {
        let shard = |sum_powers, max_abs: f64, zeros, nonfinite| {
            let (largest, largest_in) = (max_abs * 2.0, zeros as u32 + 10);
            Partial { sum_powers, max_abs, zeros, nonfinite, largest, largest_in, local: None }
        };
        let host = HostVerdict { weight: 5.0, stop: true, ..HostVerdict::default() };
        // 1 + 2^-53 - 1 is 0 from the left and 2^-53 from the right.
        let tiny = 2.0_f64.powi(-53);
        let partials = [shard(1.0, 1.0, 3, None), shard(tiny, 9.0, 4, Some(6)), shard(-1.0, 2.0, 0, Some(2))];
        let record = fold(partials, host);
        let (largest, largest_in) = (18.0, 14);
        let expected =
            RankRecord { sum_powers: 0.0, max_abs: 9.0, zeros: 7, nonfinite: Some(6), largest, largest_in, host };
        assert_eq!(record, expected);
        assert_eq!(fold([], host), RankRecord { host, ..RankRecord::default() });
    }

    #[test]
    fn a_gradient_found_nonfinite_before_the_reduction_spoils_the_step_unless_the_host_did() {
        let found = |local| Partial { local, ..Partial::default() };
        let partials = [found(None), found(Some(8)), found(Some(3))];
        let spoiled = fold(partials, HostVerdict::default()).host.spoiled;
        assert_eq!(spoiled, Some(Spoiled::NonFinite { param: 8 }), "the first bucket's is named");
        let unused = HostVerdict { spoiled: Some(Spoiled::Unused { param: 5 }), ..HostVerdict::default() };
        assert_eq!(fold(partials, unused), RankRecord { host: unused, ..RankRecord::default() });
    }

    #[test]
    fn the_norm_is_of_averaged_unscaled_unclipped_gradients() {
        let rule = VerdictRule { max_norm: 1.0, ..RANKS };
        // Sum over ranks 36 + 64 = 10^2; over 2 ranks and a scale of 8.
        let (scalars, report) = judged(&[record(36.0), record(64.0)], &rule, &ScalerRule::Constant { scale: 8.0 });
        assert_eq!(report.grad_norm, Some(10.0 / 16.0));
        assert_eq!(scalars.factor, 1.0 / 16.0, "a norm of 0.625 is below 1 and not clipped");
        assert!(report.updated && !scalars.skip);
        assert_eq!((report.loss_scale, report.next_loss_scale), (8.0, 8.0));
    }

    #[test]
    fn every_norm_combines_over_ranks_and_is_clipped_by() {
        let of = |sum_powers, max_abs| RankRecord { max_abs, ..record(sum_powers) };
        // A sum of 125 over both ranks; averaged over 2, with a scale of 8.
        let records = [of(27.0, 4.5), of(98.0, 3.0)];
        for (norm, total) in [(NormType::P(1.0), 125.0), (NormType::P(3.0), 5.0), (NormType::Inf, 4.5)] {
            let rule = VerdictRule { norm, max_norm: 0.125, ..RANKS };
            let (scalars, report) = judged(&records, &rule, &ScalerRule::Constant { scale: 8.0 });
            let expected: f64 = total / 16.0;
            assert!((report.grad_norm.unwrap_or(0.0) - expected).abs() < 1e-15, "{norm:?}: {report:?}");
            let factor = 1.0 / 16.0 * (0.125 / (expected + 1e-6));
            assert!((scalars.factor - factor).abs() < 1e-9, "{norm:?}: {scalars:?}");
        }
    }

    #[test]
    fn clipping_multiplies_by_max_norm_over_norm_plus_epsilon_rounded_once() {
        let rule = VerdictRule { max_norm: 0.1, ..RANKS };
        let (scalars, report) = judged(&[record(36.0), record(64.0)], &rule, &ScalerRule::None);
        assert_eq!(report.grad_norm, Some(5.0));
        assert_eq!(scalars.factor as f32, (0.5 * (0.1 / (5.0 + 1e-6))) as f32);
    }

    #[test]
    fn a_max_norm_of_zero_is_off() {
        let (scalars, report) = judged(&[record(1e12), record(0.0)], &RANKS, &ScalerRule::None);
        assert_eq!((scalars.factor, report.grad_norm), (0.5, Some(5e5)));
    }

    #[test]
    fn zero_gradients_are_not_blown_up_by_clipping() {
        let rule = VerdictRule { max_norm: 1.0, ..RANKS };
        let (scalars, report) = judged(&[record(0.0), record(0.0)], &rule, &ScalerRule::None);
        assert_eq!((scalars.factor, report.grad_norm, report.updated), (0.5, Some(0.0), true));
    }

    #[test]
    fn zeros_are_summed_over_ranks() {
        let records = [RankRecord { zeros: 3, ..record(1.0) }, RankRecord { zeros: 4, ..record(1.0) }];
        assert_eq!(judged(&records, &RANKS, &ScalerRule::None).1.zeros, Some(7));
    }

    #[test]
    fn weights_average_and_a_rank_may_weigh_nothing() {
        let rule = VerdictRule { average: Average::Weight, ..RANKS };
        let (scalars, report) = judged(&[weighing(36.0, 0.0), weighing(64.0, 20.0)], &rule, &ScalerRule::None);
        assert_eq!((scalars.factor, report.grad_norm, report.no_weight), (0.05, Some(0.5), false));
    }

    #[test]
    fn hosts_that_differ_in_what_must_be_alike_skip_and_the_first_of_them_is_told() {
        let of = |alike| RankRecord { host: HostVerdict { alike, ..HostVerdict::default() }, ..record(1.0) };
        let mut scalars = Scalars::initial(&DYNAMIC);
        let before = scalars;
        let report = judge(&[of(7), of(7), of(8), of(9)], &RANKS, &DYNAMIC, &mut scalars);
        assert!(report.unlike == Some(2) && !report.updated && scalars.skip, "{report:?}");
        assert_eq!((scalars.scale, scalars.growth_counter), (before.scale, before.growth_counter));
        let report = judge(&[of(7), of(7)], &RANKS, &DYNAMIC, &mut scalars);
        assert!(report.unlike.is_none() && report.updated);
    }

    #[test]
    fn no_weight_at_all_skips_and_says_so() {
        let rule = VerdictRule { average: Average::Weight, ..RANKS };
        for weight in [0.0, 1e-300] {
            let (scalars, report) = judged(&[weighing(1.0, weight), weighing(1.0, 0.0)], &rule, &DYNAMIC);
            assert!(report.no_weight && !report.updated && scalars.skip, "weight {weight}");
            assert_eq!((report.grad_norm, report.zeros, scalars.factor), (None, None, 0.0));
            assert_eq!(scalars.growth_counter, 0);
        }
    }

    #[test]
    fn a_nonfinite_gradient_skips_names_the_first_rank_and_parameter_and_backs_off() {
        let bad = |param| RankRecord { nonfinite: Some(param), ..record(f64::INFINITY) };
        let (scalars, report) = judged(&[record(1.0), bad(9), bad(2)], &RANKS, &DYNAMIC);
        assert_eq!(report.nonfinite, Some((1, 9)));
        assert!(!report.updated && scalars.skip && !report.nonfinite_is_error);
        assert_eq!((report.grad_norm, report.zeros), (None, None));
        assert_eq!((report.loss_scale, report.next_loss_scale, scalars.scale), (8.0, 4.0, 4.0));
    }

    /// A record of one element of parameter 7.
    fn holding(g: f32) -> RankRecord {
        let g = f64::from(g.abs());
        RankRecord { max_abs: g, largest: g.max(Partial::LEAST), largest_in: 7, ..record(g * g) }
    }

    #[test]
    fn finite_gradients_that_adam_could_not_square_count_as_nonfinite() {
        let clipped = VerdictRule { max_norm: 1.0, ..RANKS };
        let [fits, grows] = [63, 64].map(|power| 2.0_f32.powi(power));
        // Averaged over two: 2^63 is the limit.
        for (g, rule, scale, updated) in [
            (grows, RANKS, 1.0, true),
            (grows.next_up(), RANKS, 1.0, false),
            (f32::MAX, RANKS, 1.0, false),
            (f32::MAX, clipped, 1.0, true),
            (fits, RANKS, 0.5, true),
            (grows, RANKS, 0.5, false),
            (1e10, RANKS, 1e-37, false),
            (1e10, clipped, 1e-37, true),
            (1e-30, RANKS, 1e-37, true),
        ] {
            for scaler in [ScalerRule::Constant { scale }, tiny(scale)] {
                let (scalars, report) = judged(&[record(1.0), holding(g)], &rule, &scaler);
                assert_eq!((report.updated, scalars.skip), (updated, !updated), "{g} {rule:?} {scaler:?}");
                assert_eq!(report.nonfinite, (!updated).then_some((1, 7)), "{g} {rule:?} {scaler:?}");
                assert_eq!(report.grad_norm.is_some(), updated);
                let g = g * scalars.factor as f32;
                assert!((g * g).is_finite());
                if matches!(scaler, ScalerRule::Dynamic { .. }) {
                    assert_eq!(scalars.scale, if updated { scale } else { scale * 0.5 }, "as for inf");
                }
            }
        }
    }

    #[test]
    fn a_gradient_too_large_for_adam_is_an_error_by_policy_and_one_that_is_not_finite_is_named_first() {
        let rule = VerdictRule { on_nonfinite: OnNonFinite::Error, ..RANKS };
        let (_, report) = judged(&[holding(1e30)], &rule, &ScalerRule::None);
        assert!(report.nonfinite_is_error && report.nonfinite == Some((0, 7)));
        let nan = RankRecord { nonfinite: Some(3), ..record(f64::NAN) };
        assert_eq!(judged(&[holding(1e30), nan], &rule, &ScalerRule::None).1.nonfinite, Some((1, 3)));
        let spoiled = [holding(1e30), spoiled(Spoiled::Unused { param: 1 })];
        let (scalars, report) = judged(&spoiled, &RANKS, &tiny(1.0));
        assert_eq!((report.updated, scalars.scale), (false, 1.0), "a spoiled step moves no scale");
    }

    #[test]
    fn a_factor_that_is_no_f32_skips_zeros_too_and_so_does_a_norm_that_is_no_f64() {
        // Weights of next to nothing times a scale of next to nothing: zero times infinity would be NaN.
        let rule = VerdictRule { average: Average::Weight, ..RANKS };
        let zero = RankRecord { host: HostVerdict { weight: 1e-20, ..HostVerdict::default() }, ..holding(0.0) };
        for (scale, updated) in [(1e-18, true), (1e-19, false)] {
            let (scalars, report) = judged(&[zero], &rule, &ScalerRule::Constant { scale });
            assert_eq!((report.updated, scalars.skip, report.nonfinite.is_none()), (updated, !updated, updated));
            assert!((scalars.factor as f32).is_finite());
        }
        let rule = VerdictRule { norm: NormType::P(1.0), max_norm: 1.0, ..RANKS };
        let (scalars, report) = judged(&[record(f64::MAX)], &rule, &ScalerRule::Constant { scale: 0.25 });
        assert!(!report.updated && scalars.skip && report.nonfinite.is_some(), "{report:?}");
    }

    #[test]
    fn a_constant_scale_skips_nonfinite_steps_all_the_same() {
        let bad = RankRecord { nonfinite: Some(0), ..record(f64::NAN) };
        let rule = VerdictRule { on_nonfinite: OnNonFinite::Error, ..RANKS };
        let (scalars, report) = judged(&[bad], &rule, &ScalerRule::Constant { scale: 64.0 });
        assert!(!report.updated && scalars.skip && !report.nonfinite_is_error);
        assert_eq!(scalars.scale, 64.0);
    }

    #[test]
    fn without_a_scaler_the_policy_decides_whether_nonfinite_is_an_error() {
        let bad = RankRecord { nonfinite: Some(0), ..record(f64::NAN) };
        for (policy, is_error) in [(OnNonFinite::Skip, false), (OnNonFinite::Error, true)] {
            let rule = VerdictRule { on_nonfinite: policy, ..RANKS };
            let (scalars, report) = judged(&[bad], &rule, &ScalerRule::None);
            assert!(!report.updated && scalars.skip);
            assert_eq!(report.nonfinite_is_error, is_error);
        }
    }

    #[test]
    fn a_spoiled_step_is_skipped_and_leaves_the_scaler_alone() {
        let records = [record(1.0), spoiled(Spoiled::Abandoned { param: 4 }), spoiled(Spoiled::Unused { param: 1 })];
        let (scalars, report) = judged(&records, &RANKS, &DYNAMIC);
        assert_eq!(report.spoiled, Some((1, Spoiled::Abandoned { param: 4 })));
        assert!(!report.updated && scalars.skip);
        assert_eq!((scalars.scale, scalars.growth_counter, scalars.hysteresis), (8.0, 0, 1));

        let both = [RankRecord { nonfinite: Some(0), ..spoiled(Spoiled::Unused { param: 1 }) }];
        let (scalars, report) = judged(&both, &RANKS, &DYNAMIC);
        assert_eq!((report.nonfinite, report.next_loss_scale, scalars.hysteresis), (Some((0, 0)), 8.0, 1));
    }

    #[test]
    fn the_scaler_carries_over_from_step_to_step() {
        let mut scalars = Scalars::initial(&DYNAMIC);
        let mut scales = Vec::new();
        for bad in [false, false, true, false, false] {
            let nonfinite = bad.then_some(0);
            let records = [RankRecord { nonfinite, ..record(4.0) }];
            let report = judge(&records, &RANKS, &DYNAMIC, &mut scalars);
            scales.push((report.loss_scale, report.next_loss_scale, scalars.factor));
        }
        assert_eq!(scalars.updates, 4, "a skipped step does not count");
        // Two good steps grow 8 to 16, one bad step halves it, two good ones grow it again. The factor unscales by the
        // scale that the step's gradients carried, over two ranks.
        let (both, none) = (1.0 / 16.0, 0.0);
        assert_eq!(
            scales,
            [(8.0, 8.0, both), (8.0, 16.0, both), (16.0, 8.0, none), (8.0, 8.0, both), (8.0, 16.0, both)]
        );
    }

    #[test]
    fn any_rank_that_was_asked_to_stop_stops_all() {
        let stop = RankRecord { host: HostVerdict { stop: true, ..HostVerdict::default() }, ..record(1.0) };
        assert!(judged(&[record(1.0), stop], &RANKS, &ScalerRule::None).1.stop);
        assert!(!judged(&[record(1.0)], &RANKS, &ScalerRule::None).1.stop);
    }
}
