//! What a config must satisfy: by itself, and with the ranks and the model it is to run with (rule K1).

use toml::Value;

use super::keys::KEYS;
use super::parse::bad_value;
use super::{Config, ConfigError, Credits, Layout, ScalerKind};
use crate::actors::{Alignment, Bucketing, Deadlines, NormType, Overlap, ScalerRule};

impl Config {
    /// Checks what can be checked without a model: ranges, keys that exclude each other, keys that the chosen device or
    /// mode never reads.
    ///
    /// # Errors
    /// [`ConfigError`] names the key.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_layer()?;
        if self.scaler == ScalerKind::Dynamic && self.device != "null" && self.initial < self.min {
            // The first back-off would raise it (and on the null device there is none).
            let expected = format!("at least `scaler.min`, which is {:?}", self.min);
            return Err(bad_value("scaler.initial", &Value::Float(self.initial), &expected));
        }
        match self.dead().find(|(key, ..)| self.explicit.contains(key)) {
            Some((key, _, reason)) => Err(ConfigError::Dead { key, reason: reason.to_owned() }),
            None => Ok(()),
        }
    }

    /// What must hold after every layer: a later one can bring a key to life, but not a value into range.
    pub(super) fn validate_layer(&self) -> Result<(), ConfigError> {
        self.check_ranges()?;
        if self.explicit.contains("bucket_size") && self.explicit.contains("num_buckets") {
            return Err(ConfigError::Conflict { first: "bucket_size", second: "num_buckets" });
        }
        Ok(())
    }

    /// The keys that nothing reads as things are, set or not: each with the key that makes it so, and why.
    pub(super) fn dead(&self) -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
        let none = (self.overlap == Overlap::None).then_some((
            "overlap",
            "overlap = \"none\" gathers all before step returns",
            &["credits", "credits_bytes", "first_gather"][..],
        ));
        let chain = (self.overlap == Overlap::Chain).then_some((
            "overlap",
            "overlap = \"chain\" has one gather in flight",
            &["credits", "credits_bytes"][..],
        ));
        let null = self.device == "null";
        let emulate = null.then_some(("device", "device = \"null\" moves no bytes", &["emulate"][..]));
        let max_norm = null.then_some(("device", "device = \"null\" computes no norm", &["max_norm", "norm_type"][..]));
        let gradient = null.then_some((
            "device",
            "device = \"null\" sees no gradient",
            &["on_nonfinite", "check_for_nan_in_grad"][..],
        ));
        // The loss scale and hysteresis that a run starts from are read there: the engine and its state tell them.
        let scripted = null.then_some((
            "device",
            "device = \"null\" has its verdicts from a script",
            &["average", "unused", "scaler.min", "scaler.growth", "scaler.backoff", "scaler.interval"][..],
        ));
        let scaled = (self.scaler != ScalerKind::None).then_some((
            "scaler.kind",
            "with a loss scaler inf is normal: a non-finite gradient always skips",
            &["on_nonfinite", "check_for_nan_in_grad"][..],
        ));
        let layout = (self.layout == Layout::Reference).then_some((
            "layout",
            "layout = \"reference\" pads bucket ends to the number of data-parallel ranks only",
            &["bandwidth_alignment"][..],
        ));
        let constant = (self.scaler != ScalerKind::Constant).then_some((
            "scaler.kind",
            "only the constant scaler reads it",
            &["scaler.scale"][..],
        ));
        let dynamic = (self.scaler != ScalerKind::Dynamic).then_some((
            "scaler.kind",
            "only the dynamic scaler reads it",
            &[
                "scaler.initial",
                "scaler.min",
                "scaler.growth",
                "scaler.backoff",
                "scaler.interval",
                "scaler.hysteresis",
            ][..],
        ));
        let rules = [none, chain, layout, emulate, max_norm, gradient, scripted, scaled, constant, dynamic];
        rules.into_iter().flatten().flat_map(|(by, why, keys)| keys.iter().map(move |key| (*key, by, why)))
    }

    /// Checks the config against the job it is to run with.
    pub(crate) fn validate_for<'a>(
        &self,
        ranks: usize,
        mut f16_params: impl Iterator<Item = (&'a str, &'static str)>,
    ) -> Result<(), ConfigError> {
        self.validate()?;
        if let Some(configured) = self.ranks.filter(|r| *r != ranks) {
            return Err(ConfigError::Ranks { configured, started: ranks });
        }
        if ranks == 1 && self.explicit.contains("emulate") {
            return Err(ConfigError::Dead { key: "emulate", reason: "one rank has no link".into() });
        }
        match f16_params.next() {
            Some((param, what)) if self.scaler == ScalerKind::None => {
                Err(ConfigError::F16WithoutScaler { param: param.to_owned(), what })
            }
            _ => Ok(()),
        }
    }

    /// The builder takes any value of the right type; the table of keys says which are in range.
    fn check_ranges(&self) -> Result<(), ConfigError> {
        let whole = |n: u64| Value::Integer(i64::try_from(n).unwrap_or(i64::MAX));
        for name in &self.explicit {
            let value = match *name {
                "ranks" => whole(self.ranks.unwrap_or(1) as u64),
                "model_parallel" => whole(self.model_parallel as u64),
                "pipeline_parallel" => whole(self.pipeline_parallel as u64),
                "device" => Value::String(self.device.clone()),
                "transport" => Value::String(self.transport.clone()),
                "credits" => match self.credits {
                    Credits::Buckets(n) => whole(u64::from(n)),
                    Credits::Unlimited => continue,
                },
                "credits_bytes" => whole(self.credits_bytes.unwrap_or(1)),
                "gather_group_bytes" => whole(self.gather_group_bytes as u64),
                "bucket_size" => whole(self.bucket_size.unwrap_or(1) as u64),
                "num_buckets" => whole(self.num_buckets.unwrap_or(1) as u64),
                "lr" => Value::Float(self.lr),
                "betas" => Value::Array(vec![Value::Float(self.betas.0), Value::Float(self.betas.1)]),
                "eps" => Value::Float(self.eps),
                "weight_decay" => Value::Float(self.weight_decay),
                "max_norm" => Value::Float(self.max_norm),
                "norm_type" => match self.norm_type {
                    NormType::P(p) => Value::Float(p),
                    _ => continue,
                },
                "scaler.scale" => Value::Float(self.scale),
                "scaler.initial" => Value::Float(self.initial),
                "scaler.min" => Value::Float(self.min),
                "scaler.growth" => Value::Float(self.growth),
                "scaler.backoff" => Value::Float(self.backoff),
                "scaler.interval" => whole(u64::from(self.interval)),
                "scaler.hysteresis" => whole(u64::from(self.hysteresis)),
                "steps_in_flight" => whole(u64::from(self.steps_in_flight)),
                "deadlines.start_up_s" => Value::Float(self.start_up.as_secs_f64()),
                "deadlines.collective_s" => Value::Float(self.collective.as_secs_f64()),
                "deadlines.silence_s" => Value::Float(self.silence.as_secs_f64()),
                _ => continue,
            };
            if let Some(key) = KEYS.iter().find(|k| k.name == *name)
                && (key.set)(&mut Self::default(), &value).is_none()
            {
                return Err(bad_value(key.name, &value, key.values));
            }
        }
        Ok(())
    }

    pub(crate) fn bucketing(&self) -> Bucketing {
        match (self.bucket_size, self.num_buckets) {
            (Some(numel), _) => Bucketing::Size(numel),
            (None, Some(buckets)) => Bucketing::Count(buckets),
            (None, None) => Bucketing::Default,
        }
    }

    pub(crate) fn alignment(&self) -> Alignment {
        match self.layout {
            Layout::Reference => Alignment::Reference,
            Layout::Standard if self.bandwidth_alignment => Alignment::Bandwidth,
            Layout::Standard => Alignment::Standard,
        }
    }

    pub(crate) fn scaler_rule(&self) -> ScalerRule {
        match self.scaler {
            ScalerKind::None => ScalerRule::None,
            ScalerKind::Constant => ScalerRule::Constant { scale: self.scale as f32 },
            ScalerKind::Dynamic => ScalerRule::Dynamic {
                initial: self.initial as f32,
                min: self.min as f32,
                growth: self.growth as f32,
                backoff: self.backoff as f32,
                interval: self.interval,
                hysteresis: self.hysteresis as i32,
            },
        }
    }

    pub(crate) fn deadline_rule(&self) -> Deadlines {
        Deadlines { start_up: self.start_up, collective: self.collective, silence: self.silence }
    }
}
