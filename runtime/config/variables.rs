//! The environment as a layer of the configuration: `GATHERFLOW_OVERLAP=chain` sets `overlap`.
//!
//! Layers go defaults, file, variables, then builder methods and flags; each overrides the ones before it, key by key. Of
//! `bucket_size` and `num_buckets`, which exclude each other, a later layer's one also drops the other one of an earlier
//! layer; likewise a later layer's mode or device drops the keys of earlier layers that it never reads. A variable counts as
//! set explicitly (rule K1, checked when all layers are there), and one that names no key is refused, since a misspelt one
//! would be ignored in silence.

use std::collections::BTreeSet;
use std::ffi::OsString;

use super::keys::{KEYS, Key};
use super::{Config, ConfigError};

/// What all variables of this project begin with.
const PREFIX: &str = "GATHERFLOW_";

/// Variables that are no configuration keys: where a library lies, and what benchmarks, tests and the example read.
const OTHERS: &[&str] = &["NCCL", "BENCH_", "MEMORY_", "PROPERTY_", "SOAK_", "TRAIN_GPT_"];

/// Keys that exclude each other.
const RIVALS: [(&str, &str); 2] = [("bucket_size", "num_buckets"), ("num_buckets", "bucket_size")];

impl Key {
    /// The environment variable that sets it: `GATHERFLOW_`, then the name in capitals with its dot as an underscore.
    pub fn variable(&self) -> String {
        format!("{PREFIX}{}", self.name.replace('.', "_").to_uppercase())
    }
}

impl Config {
    /// Sets what this process's `GATHERFLOW_*` variables say over `base`, which is a file's configuration or the defaults.
    ///
    /// # Errors
    /// [`ConfigError::UnknownVariable`] with the nearest name as a hint, [`ConfigError::Variable`] for a value that does
    /// not fit, and keys that exclude each other. Keys that nothing reads are left to [`Config::validate`], since flags may
    /// still bring them to life; planning and starting validate.
    pub fn from_env(base: Self) -> Result<Self, ConfigError> {
        Self::from_variables(base, std::env::vars_os())
    }

    /// As [`Config::from_env`], from given variables. Those of other names are left alone.
    ///
    /// ```
    /// use gatherflow::Config;
    ///
    /// let file = Config::from_toml("overlap = \"window\"\nbucket_size = 1000")?;
    /// let config = Config::from_variables(file, [("GATHERFLOW_CREDITS", "unlimited"), ("GATHERFLOW_NUM_BUCKETS", "4")])?;
    /// assert!(config.is_explicit("credits") && !config.is_explicit("bucket_size"));
    /// let error = Config::from_variables(config, [("GATHERFLOW_CREDIT", "2")]).unwrap_err();
    /// assert!(error.to_string().contains("did you mean `GATHERFLOW_CREDITS`?"));
    /// # Ok::<(), gatherflow::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// As [`Config::from_env`].
    pub fn from_variables<N: Into<OsString>, V: Into<OsString>>(
        base: Self,
        variables: impl IntoIterator<Item = (N, V)>,
    ) -> Result<Self, ConfigError> {
        let mut layer = Vec::new();
        for (name, value) in variables {
            let name = name.into().to_string_lossy().into_owned();
            let Some(rest) = name.strip_prefix(PREFIX) else { continue };
            if OTHERS.iter().any(|other| rest.starts_with(other)) {
                continue;
            }
            let key = match KEYS.iter().find(|key| key.variable() == name) {
                Some(key) => key.name,
                None if rest == "SCALER" => "scaler",
                None => return Err(unknown(name)),
            };
            layer.push((name, key, value.into().to_string_lossy().into_owned()));
        }
        // The system's order is anybody's; the first error must not be.
        layer.sort();
        let mut config = base;
        let below = config.begin_layer(layer.iter().map(|(_, key, _)| *key));
        for (name, key, value) in layer {
            config.set(key, &value).map_err(|reason| ConfigError::Variable { name, reason: Box::new(reason) })?;
        }
        config.end_layer(&below);
        config.validate_layer()?;
        Ok(config)
    }

    /// Sets keys from text as one layer over what is there, as command-line flags are.
    ///
    /// # Errors
    /// [`ConfigError`] names the key that is unknown or whose value does not fit.
    pub fn set_layer<'a>(
        &mut self,
        layer: impl IntoIterator<Item = (&'a str, &'a str)> + Clone,
    ) -> Result<(), ConfigError> {
        let below = self.begin_layer(layer.clone().into_iter().map(|(key, _)| key));
        layer.into_iter().try_for_each(|(key, value)| self.set(key, value))?;
        self.end_layer(&below);
        Ok(())
    }

    /// Forgets what the keys of a new layer replace; the keys that stay set by the layers below.
    fn begin_layer<'a>(&mut self, new: impl Iterator<Item = &'a str>) -> BTreeSet<&'static str> {
        for key in new {
            self.explicit.remove(if key == "scaler" { "scaler.kind" } else { key });
            for (_, rival) in RIVALS.iter().filter(|(one, _)| *one == key) {
                self.explicit.remove(rival);
                match *rival {
                    "bucket_size" => self.bucket_size = None,
                    _ => self.num_buckets = None,
                }
            }
        }
        self.explicit.clone()
    }

    /// Forgets that a layer below set a key which this layer's choice of mode or device leaves unread.
    fn end_layer(&mut self, below: &BTreeSet<&'static str>) {
        let overruled: Vec<_> = self.dead().filter(|(key, by, _)| below.contains(key) && !below.contains(by)).collect();
        for (key, by, _) in overruled {
            if self.explicit.contains(by) {
                self.explicit.remove(key);
            }
        }
    }
}

fn unknown(name: String) -> ConfigError {
    let known = KEYS.iter().map(Key::variable);
    let nearest = known.map(|v| (strsim::jaro_winkler(&name[PREFIX.len()..], &v[PREFIX.len()..]), v));
    let hint = match nearest.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((likeness, variable)) if likeness > 0.8 => format!("did you mean `{variable}`?"),
        _ => format!("after {PREFIX} comes a key in capitals, its dot as an underscore, such as {PREFIX}NUM_BUCKETS"),
    };
    ConfigError::UnknownVariable { name, hint }
}
