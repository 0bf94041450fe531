//! 64-bit FNV-1a, the one hash that ranks compare and files may hold: cheap, the same everywhere, order-sensitive.

/// A running hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fnv(u64);

impl Fnv {
    /// The hash of nothing.
    pub const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    /// What each byte is multiplied with.
    pub const PRIME: u64 = 0x0000_0100_0000_01b3;

    /// The hash of nothing.
    pub const fn new() -> Self {
        Self(Self::BASIS)
    }

    /// Goes on with bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(Self::PRIME));
    }

    /// Goes on with a word, little-endian.
    pub fn word(&mut self, word: u64) {
        self.bytes(&word.to_le_bytes());
    }

    /// Goes on with words.
    pub fn words(&mut self, words: impl IntoIterator<Item = u64>) {
        words.into_iter().for_each(|word| self.word(word));
    }

    /// Goes on with a text, its length in front.
    pub fn text(&mut self, text: &str) {
        self.word(text.len() as u64);
        self.bytes(text.as_bytes());
    }

    /// The hash so far.
    pub const fn finish(self) -> u64 {
        self.0
    }
}

impl Default for Fnv {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::Fnv;

    #[test]
    fn the_hash_is_fnv_1a() {
        let mut hash = Fnv::new();
        hash.bytes(b"foobar");
        assert_eq!(hash.finish(), 0x8594_4171_f739_67e8);
    }
}
