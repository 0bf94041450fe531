//! As much of pickle, protocol 2, as `torch.save` uses for tensors in dicts and lists. Nothing is run: what is not in this list is
//! an error that names it.
//!
//! Values refer to each other by number, as they do in Python, so nothing is copied and nothing recurses: memory and time are
//! bounded by the length of the pickle.

use std::collections::HashMap;

use super::error::MegatronProblem;

/// The number of a value.
pub(super) type Id = usize;

#[derive(Debug)]
pub(super) enum Value {
    None,
    Bool,
    Int(i64),
    Text(String),
    /// A name of a module, with dots.
    Global(String),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Storage(Storage),
    Tensor(Tensor),
}

/// A file beside the pickle.
#[derive(Clone, Copy, Debug)]
pub(super) struct Storage {
    /// A global such as `torch.FloatStorage`.
    pub(super) kind: Id,
    /// Its name, a text.
    pub(super) key: Id,
    pub(super) numel: usize,
}

/// A view into a storage, in elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor {
    pub(super) storage: Storage,
    pub(super) offset: usize,
    /// A tuple.
    pub(super) shape: Id,
    /// A tuple.
    pub(super) stride: Id,
}

#[derive(Debug)]
pub(super) struct Pickle {
    values: Vec<Value>,
    pub(super) root: Id,
}

const REBUILD: &str = "torch._utils._rebuild_tensor_v2";
const ORDERED_DICT: &str = "collections.OrderedDict";
const DTYPES: [&str; 3] = ["float32", "float16", "bfloat16"];

/// Whether optimizer state may name it: what rebuilds a tensor, the hooks that it has not, types of storages and elements.
fn is_known(global: &str) -> bool {
    [REBUILD, ORDERED_DICT].contains(&global)
        || global.strip_prefix("torch.").is_some_and(|name| {
            DTYPES.contains(&name)
                || name.strip_suffix("Storage").is_some_and(|kind| kind.bytes().all(|b| b.is_ascii_alphanumeric()))
        })
}

impl Pickle {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, MegatronProblem> {
        let mut machine = Machine { bytes, ..Machine::default() };
        loop {
            machine.start = machine.at;
            if let Some(root) = machine.step()? {
                return Ok(Self { values: machine.values, root });
            }
        }
    }

    pub(super) fn value(&self, id: Id) -> &Value {
        &self.values[id]
    }

    /// The only number of a tuple: a shape or stride of one dimension.
    pub(super) fn flat(&self, tuple: Id) -> Option<usize> {
        match self.value(tuple) {
            Value::Tuple(items) => match items[..] {
                [number] => size(self.value(number)),
                _ => None,
            },
            _ => None,
        }
    }

    /// What a dict has under a key of text.
    pub(super) fn get(&self, dict: &[(Id, Id)], key: &str) -> Option<Id> {
        let found = |id: Id| matches!(self.value(id), Value::Text(text) if text == key);
        dict.iter().rev().find(|(id, _)| found(*id)).map(|(_, value)| *value)
    }
}

fn size(value: &Value) -> Option<usize> {
    match value {
        Value::Int(number) => usize::try_from(*number).ok(),
        _ => None,
    }
}

/// What a pickle is a program for.
#[derive(Default)]
struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Where the running instruction starts.
    start: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl<'a> Machine<'a> {
    fn refused(&self, what: impl Into<String>) -> MegatronProblem {
        MegatronProblem::Pickle { what: what.into(), at: self.start }
    }

    fn step(&mut self) -> Result<Option<Id>, MegatronProblem> {
        match self.take::<1>()?[0] {
            0x80 => match self.take::<1>()?[0] {
                2 => {}
                other => return Err(self.refused(format!("pickle protocol {other}, not 2"))),
            },
            b'(' => self.marks.push(self.stack.len()),
            b'}' => self.push(Value::Dict(vec![])),
            b']' => self.push(Value::List(vec![])),
            b')' => self.push(Value::Tuple(vec![])),
            b'N' => self.push(Value::None),
            0x88 | 0x89 => self.push(Value::Bool),
            b'K' => {
                let number = self.take::<1>()?[0].into();
                self.push(Value::Int(number));
            }
            b'M' => {
                let number = u16::from_le_bytes(self.take()?).into();
                self.push(Value::Int(number));
            }
            b'J' => {
                let number = i32::from_le_bytes(self.take()?).into();
                self.push(Value::Int(number));
            }
            0x8a => self.long()?,
            b'X' => {
                let length = u32::from_le_bytes(self.take()?) as usize;
                let text =
                    std::str::from_utf8(self.slice(length)?).map_err(|_| self.refused("text that is not UTF-8"))?;
                self.push(Value::Text(text.to_owned()));
            }
            b'c' => {
                let global = format!("{}.{}", self.line()?, self.line()?);
                if !is_known(&global) {
                    return Err(self.refused(format!("`{global}`")));
                }
                self.push(Value::Global(global));
            }
            b'q' => {
                let number = self.take::<1>()?[0].into();
                self.remember(number)?;
            }
            b'r' => {
                let number = u32::from_le_bytes(self.take()?);
                self.remember(number)?;
            }
            b'h' => {
                let number = self.take::<1>()?[0].into();
                self.recall(number)?;
            }
            b'j' => {
                let number = u32::from_le_bytes(self.take()?);
                self.recall(number)?;
            }
            b't' => {
                let items = self.marked()?;
                self.push(Value::Tuple(items));
            }
            count @ 0x85..=0x87 => {
                let mut items: Vec<Id> = (0x84..count).map(|_| self.pop()).collect::<Result<_, _>>()?;
                items.reverse();
                self.push(Value::Tuple(items));
            }
            b'a' => {
                let item = self.pop()?;
                self.append([item])?;
            }
            b'e' => {
                let items = self.marked()?;
                self.append(items)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set(&[key, value])?;
            }
            b'u' => {
                let items = self.marked()?;
                self.set(&items)?;
            }
            b'Q' => self.storage()?,
            b'R' => self.reduce()?,
            b'.' => return self.pop().map(Some),
            other => return Err(self.refused(format!("instruction {other:#04x}"))),
        }
        Ok(None)
    }

    fn slice(&mut self, length: usize) -> Result<&'a [u8], MegatronProblem> {
        let rest = &self.bytes[self.at..];
        let slice = rest.get(..length).ok_or_else(|| self.refused("an end that comes too early"))?;
        self.at += length;
        Ok(slice)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], MegatronProblem> {
        let mut out = [0; N];
        out.copy_from_slice(self.slice(N)?);
        Ok(out)
    }

    fn line(&mut self) -> Result<String, MegatronProblem> {
        let rest = &self.bytes[self.at..];
        let length = rest.iter().take(100).position(|byte| *byte == b'\n');
        let length = length.ok_or_else(|| self.refused("a name that does not end"))?;
        let line = String::from_utf8_lossy(self.slice(length)?).into_owned();
        self.at += 1;
        Ok(line)
    }

    /// An int of up to 8 bytes.
    fn long(&mut self) -> Result<(), MegatronProblem> {
        let length = self.take::<1>()?[0].into();
        let bytes = self.slice(length)?;
        let fill = if bytes.last().is_some_and(|last| last & 0x80 != 0) { 0xff } else { 0 };
        let mut number = [fill; 8];
        let Some(out) = number.get_mut(..length) else { return Err(self.refused("an int of more than 8 bytes")) };
        out.copy_from_slice(bytes);
        self.push(Value::Int(i64::from_le_bytes(number)));
        Ok(())
    }

    fn push(&mut self, value: Value) {
        self.stack.push(self.values.len());
        self.values.push(value);
    }

    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Result<Id, MegatronProblem> {
        self.stack[self.floor()..].last().copied().ok_or_else(|| self.refused("an instruction without its operands"))
    }

    fn pop(&mut self) -> Result<Id, MegatronProblem> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    /// Everything from the last mark on.
    fn marked(&mut self) -> Result<Vec<Id>, MegatronProblem> {
        let mark = self.marks.pop().ok_or_else(|| self.refused("an instruction without its mark"))?;
        Ok(self.stack.split_off(mark))
    }

    fn remember(&mut self, number: u32) -> Result<(), MegatronProblem> {
        let top = self.top()?;
        self.memo.insert(number, top);
        Ok(())
    }

    fn recall(&mut self, number: u32) -> Result<(), MegatronProblem> {
        let id = *self.memo.get(&number).ok_or_else(|| self.refused("a reference to nothing"))?;
        self.stack.push(id);
        Ok(())
    }

    fn append(&mut self, items: impl IntoIterator<Item = Id>) -> Result<(), MegatronProblem> {
        let list = self.top()?;
        let Value::List(list) = &mut self.values[list] else { return Err(self.refused("an append to no list")) };
        list.extend(items);
        Ok(())
    }

    fn set(&mut self, items: &[Id]) -> Result<(), MegatronProblem> {
        let dict = self.top()?;
        let (pairs, []) = items.as_chunks::<2>() else { return Err(self.refused("a key without a value")) };
        let Value::Dict(dict) = &mut self.values[dict] else { return Err(self.refused("a key for no dict")) };
        dict.extend(pairs.iter().map(|[key, value]| (*key, *value)));
        Ok(())
    }

    /// `("storage", type, key, location, numel)`.
    fn storage(&mut self) -> Result<(), MegatronProblem> {
        let id = self.pop()?;
        let storage = match &self.values[id] {
            Value::Tuple(items) => match items[..] {
                [_, kind, key, _, numel] => match (&self.values[kind], &self.values[key], size(&self.values[numel])) {
                    (Value::Global(_), Value::Text(_), Some(numel)) => Some(Storage { kind, key, numel }),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        };
        self.push(Value::Storage(storage.ok_or_else(|| self.refused("a persistent id of no storage"))?));
        Ok(())
    }

    fn reduce(&mut self) -> Result<(), MegatronProblem> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let value = match (&self.values[function], &self.values[arguments]) {
            (Value::Global(name), Value::Tuple(items)) => match (&name[..], &items[..]) {
                (ORDERED_DICT, []) => Some(Value::Dict(vec![])),
                // What follows is whether it needs a gradient, and hooks.
                (REBUILD, &[storage, offset, shape, stride, ..]) => {
                    match (&self.values[storage], size(&self.values[offset])) {
                        (Value::Storage(storage), Some(offset)) => {
                            Some(Value::Tensor(Tensor { storage: *storage, offset, shape, stride }))
                        }
                        _ => None,
                    }
                }
                _ => None,
            },
            _ => None,
        };
        self.push(value.ok_or_else(|| self.refused("a call that rebuilds no tensor"))?);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
