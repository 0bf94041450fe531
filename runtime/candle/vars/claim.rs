//! Who trains which `Var`: one live optimizer each.
//!
//! Ranks are threads of one process, and a clone of a `Var` is the same memory. Two ranks that were handed the same ones
//! would write parameters under each other's forward; two names for one would update it twice. Both are refused by name,
//! through a set of the ids that live optimizers of this process hold.

use std::collections::HashSet;
use std::sync::LazyLock;

use candle_core::{TensorId, Var};
use parking_lot::Mutex;

use crate::error::{Error, ErrorKind};

static CLAIMED: LazyLock<Mutex<HashSet<TensorId>>> = LazyLock::new(Mutex::default);

/// The `Var`s of one optimizer, given back on drop.
#[derive(Debug)]
pub(super) struct Claims(Vec<TensorId>);

impl Claims {
    /// All of `vars`, or none and an error that names the first one taken.
    pub(super) fn of(vars: &[(String, Var)]) -> Result<Self, Error> {
        let mut claims = Self(Vec::with_capacity(vars.len()));
        for (index, (name, var)) in vars.iter().enumerate() {
            let id = var.id();
            if CLAIMED.lock().insert(id) {
                claims.0.push(id);
                continue;
            }
            let message = match vars[..index].iter().find(|(_, other)| other.id() == id) {
                Some((other, _)) => format!("it is the same Var as `{other}`: give each Var once"),
                None => "this Var is trained by another live VarOptimizer: each rank makes Vars of its own".into(),
            };
            return Err(Error::new(ErrorKind::Model, message).of_parameter(name));
        }
        Ok(claims)
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        let mut claimed = CLAIMED.lock();
        for id in &self.0 {
            claimed.remove(id);
        }
    }
}
