//! From TOML text, files and command-line flags to a config: every value goes through the table of keys.

use std::path::Path;

use toml::{Table, Value};

use super::keys::{KEYS, Key};
use super::{Config, ConfigError};

/// Most characters of a value in a message.
const LONGEST: usize = 60;

impl Config {
    /// Reads TOML text. Keys that are left out keep their defaults.
    ///
    /// # Errors
    /// [`ConfigError`] names the key that is unknown or whose value does not fit, and keys that exclude each other.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let table: Table = text
            .parse()
            .map_err(|e: toml::de::Error| ConfigError::Syntax { reason: e.to_string().trim_end().to_owned() })?;
        let mut config = Self::default();
        for (name, value) in &table {
            let (before, adds) = (config.explicit.len(), leaves(name, value));
            config.insert(name, value)?;
            if config.explicit.len() < before + adds {
                return Err(ConfigError::Twice { key: name.clone() });
            }
        }
        config.validate()?;
        Ok(config)
    }

    /// Reads a TOML file.
    ///
    /// # Errors
    /// [`ConfigError::Unreadable`], and [`ConfigError::File`] with what [`Config::from_toml`] says.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path)
            .map_err(|e| ConfigError::Unreadable { path: path.to_owned(), reason: e.to_string() })?;
        Self::from_toml(&text).map_err(|reason| ConfigError::File { path: path.to_owned(), reason: Box::new(reason) })
    }

    /// Sets one key from text, as a command-line flag gives it: `set("credits", "4")`, `set("overlap", "chain")`.
    ///
    /// # Errors
    /// [`ConfigError`] names the key that is unknown or whose value does not fit.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        let parsed =
            format!("v = {value}").parse::<Table>().ok().filter(|t| t.len() == 1).and_then(|mut t| t.remove("v"));
        self.insert(key, &parsed.unwrap_or_else(|| Value::String(value.to_owned())))
    }

    fn insert(&mut self, name: &str, value: &Value) -> Result<(), ConfigError> {
        match (name, value) {
            ("scaler", Value::String(_)) => self.insert("scaler.kind", value),
            (_, Value::Table(inner)) if KEYS.iter().any(|k| in_table(k, name)) => {
                inner.iter().try_for_each(|(key, value)| self.insert(&format!("{name}.{key}"), value))
            }
            _ if KEYS.iter().any(|k| in_table(k, name)) => {
                let keys: Vec<_> = KEYS.iter().filter_map(|k| k.name.strip_prefix(name)?.strip_prefix('.')).collect();
                Err(bad_value(name, value, &format!("a table with keys of {}", keys.join(", "))))
            }
            _ => {
                let key = KEYS.iter().find(|k| k.name == name).ok_or_else(|| unknown(name))?;
                (key.set)(self, value).ok_or_else(|| bad_value(name, value, key.values))?;
                self.explicit.insert(key.name);
                Ok(())
            }
        }
    }
}

/// How many keys a value of a file sets.
fn leaves(name: &str, value: &Value) -> usize {
    match value {
        Value::Table(inner) if KEYS.iter().any(|k| in_table(k, name)) => inner.len(),
        _ => 1,
    }
}

/// Names key and value, the value in a length that can be read.
pub(super) fn bad_value(key: &str, value: &Value, expected: &str) -> ConfigError {
    let mut value = match value {
        // Debug is short where Display writes all digits.
        Value::Float(x) => format!("{x:?}"),
        _ => value.to_string(),
    };
    if value.chars().count() > LONGEST {
        value = value.chars().take(LONGEST).chain("...".chars()).collect();
    }
    ConfigError::BadValue { key: key.to_owned(), value, expected: expected.to_owned() }
}

fn in_table(key: &Key, table: &str) -> bool {
    key.name.strip_prefix(table).is_some_and(|rest| rest.starts_with('.'))
}

fn unknown(name: &str) -> ConfigError {
    let nearest = KEYS.iter().map(|k| (strsim::jaro_winkler(name, k.name), k.name)).max_by(|a, b| a.0.total_cmp(&b.0));
    let hint = match nearest {
        Some((likeness, key)) if likeness > 0.8 => format!("did you mean `{key}`?"),
        _ => format!("the keys are {}", KEYS.iter().map(|k| k.name).collect::<Vec<_>>().join(", ")),
    };
    ConfigError::UnknownKey { key: name.to_owned(), hint }
}
