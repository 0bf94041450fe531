//! Words on their way to a rank, and queues of them, by number.

use std::collections::HashMap;

use gatherflow_actors::control::ControlMsg;

use super::turn::hash_of_debug;

/// All words and queues seen so far. Queue 0 is empty.
pub struct Words {
    by_number: Vec<ControlMsg>,
    by_hash: HashMap<u64, u32>,
    queues: Vec<Vec<u32>>,
    by_content: HashMap<Vec<u32>, u32>,
    rest: HashMap<u32, u32>,
    longer: HashMap<(u32, u32), u32>,
}

impl Words {
    pub fn new() -> Self {
        Self {
            by_number: Vec::new(),
            by_hash: HashMap::new(),
            queues: vec![Vec::new()],
            by_content: HashMap::from([(Vec::new(), 0)]),
            rest: HashMap::new(),
            longer: HashMap::new(),
        }
    }

    pub fn number(&mut self, word: ControlMsg) -> u32 {
        let (next, words) = (self.by_number.len() as u32, &mut self.by_number);
        *self.by_hash.entry(hash_of_debug(&word)).or_insert_with(|| {
            words.push(word);
            next
        })
    }

    pub fn word(&self, number: u32) -> &ControlMsg {
        &self.by_number[number as usize]
    }

    /// The oldest word of a queue.
    pub fn first(&self, queue: u32) -> Option<u32> {
        self.queues[queue as usize].first().copied()
    }

    pub fn without_first(&mut self, queue: u32) -> u32 {
        if let Some(rest) = self.rest.get(&queue) {
            return *rest;
        }
        let rest = self.intern(self.queues[queue as usize][1..].to_vec());
        self.rest.insert(queue, rest);
        rest
    }

    pub fn with(&mut self, queue: u32, word: u32) -> u32 {
        if let Some(longer) = self.longer.get(&(queue, word)) {
            return *longer;
        }
        let mut content = self.queues[queue as usize].clone();
        content.push(word);
        let longer = self.intern(content);
        self.longer.insert((queue, word), longer);
        longer
    }

    fn intern(&mut self, content: Vec<u32>) -> u32 {
        let (next, queues) = (self.queues.len() as u32, &mut self.queues);
        *self.by_content.entry(content).or_insert_with_key(|content| {
            queues.push(content.clone());
            next
        })
    }
}
