//! The loss scaler (SPEC T5, T6): where it starts, and how a step with or without non-finite gradients moves it.

use super::{Scalars, ScalerRule};

impl Scalars {
    /// The scalars before the first step. Until a verdict is reached Adam does nothing.
    pub fn initial(rule: &ScalerRule) -> Self {
        let (scale, hysteresis) = match *rule {
            ScalerRule::None => (1.0, 0),
            ScalerRule::Constant { scale } => (scale, 0),
            ScalerRule::Dynamic { initial, hysteresis, .. } => (initial, hysteresis),
        };
        Self { factor: 0.0, skip: true, scale, growth_counter: 0, hysteresis, updates: 0 }
    }

    /// Moves the scaler after a step that ended on its gradients' merits.
    pub(super) fn move_scale(&mut self, rule: &ScalerRule, found_nonfinite: bool) {
        let ScalerRule::Dynamic { min, growth, backoff, interval, hysteresis, .. } = *rule else {
            return;
        };
        if found_nonfinite {
            self.growth_counter = 0;
            self.hysteresis = self.hysteresis.saturating_sub(1);
            if self.hysteresis <= 0 {
                self.scale = (self.scale * backoff).max(min);
            }
            return;
        }
        self.growth_counter = self.growth_counter.saturating_add(1);
        if self.growth_counter >= interval {
            self.growth_counter = 0;
            self.hysteresis = hysteresis;
            let grown = self.scale * growth;
            // An infinite scale would turn every later gradient into inf or NaN and never come back.
            if grown.is_finite() {
                self.scale = grown;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: ScalerRule =
        ScalerRule::Dynamic { initial: 1024.0, min: 1.0, growth: 2.0, backoff: 0.5, interval: 3, hysteresis: 2 };

    /// Runs steps (`.` good, `!` non-finite); tells scale, growth counter and hysteresis after each.
    fn run(rule: ScalerRule, steps: &str) -> Vec<(f32, u32, i32)> {
        let mut scalars = Scalars::initial(&rule);
        let step = |outcome| {
            scalars.move_scale(&rule, outcome == '!');
            (scalars.scale, scalars.growth_counter, scalars.hysteresis)
        };
        steps.chars().map(step).collect()
    }

    #[test]
    fn the_scale_grows_after_the_interval_of_good_steps() {
        assert_eq!(run(RULE, "...."), [(1024.0, 1, 2), (1024.0, 2, 2), (2048.0, 0, 2), (2048.0, 1, 2)]);
    }

    #[test]
    fn the_first_bad_step_is_forgiven_and_the_second_backs_off() {
        assert_eq!(run(RULE, "!!"), [(1024.0, 0, 1), (512.0, 0, 0)]);
    }

    #[test]
    fn hysteresis_is_refilled_by_growth_and_by_nothing_else() {
        assert_eq!(
            run(RULE, "!..!.!...!!"),
            [
                (1024.0, 0, 1),
                (1024.0, 1, 1),
                (1024.0, 2, 1),
                (512.0, 0, 0),
                (512.0, 1, 0),
                (256.0, 0, -1),
                (256.0, 1, -1),
                (256.0, 2, -1),
                (512.0, 0, 2),
                (512.0, 0, 1),
                (256.0, 0, 0),
            ]
        );
    }

    #[test]
    fn the_scale_never_falls_below_the_minimum() {
        let rule =
            ScalerRule::Dynamic { initial: 3.0, min: 1.0, growth: 2.0, backoff: 0.5, interval: 3, hysteresis: 1 };
        assert_eq!(run(rule, "!!!"), [(1.5, 0, 0), (1.0, 0, -1), (1.0, 0, -2)]);
    }

    #[test]
    fn growth_that_would_overflow_leaves_a_finite_scale() {
        let huge = 2.0_f32.powi(127);
        let rule =
            ScalerRule::Dynamic { initial: huge, min: 1.0, growth: 2.0, backoff: 0.5, interval: 1, hysteresis: 1 };
        assert_eq!(run(rule, "..!"), [(huge, 0, 1), (huge, 0, 1), (huge / 2.0, 0, 0)]);
    }

    #[test]
    fn from_the_default_scale_an_f16_run_comes_down_one_step_at_a_time() {
        let initial = 2.0_f32.powi(32);
        let rule = ScalerRule::Dynamic { initial, min: 1.0, growth: 2.0, backoff: 0.5, interval: 1000, hysteresis: 2 };
        let scales: Vec<f32> = run(rule, "!!!!").into_iter().map(|(scale, ..)| scale).collect();
        assert_eq!(scales, [initial, initial / 2.0, initial / 4.0, initial / 8.0]);
    }

    #[test]
    fn a_constant_scale_and_no_scale_never_move() {
        assert_eq!(run(ScalerRule::Constant { scale: 128.0 }, "!.!"), [(128.0, 0, 0); 3]);
        assert_eq!(run(ScalerRule::None, "!.!"), [(1.0, 0, 0); 3]);
    }
}
