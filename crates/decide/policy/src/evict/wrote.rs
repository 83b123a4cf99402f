//! A hashed bit per page: "written to since it was installed".
//!
//! Rings have no index, so the bit cannot lie with the entry. Two pages that share a bit cost one
//! needless second chance.

/// Bits for each page of capacity; at 4, one page in five or so borrows another's bit at worst.
const BITS_PER_PAGE: usize = 4;

/// The bits.
pub(super) struct WroteBits {
    words: Vec<u64>,
    shift: u32,
}

impl WroteBits {
    pub(super) fn new(capacity_pages: usize) -> Self {
        let bits = (capacity_pages * BITS_PER_PAGE).next_power_of_two().max(64);
        Self { words: vec![0; bits / 64], shift: 64 - bits.ilog2() }
    }

    fn place(&self, page: u32) -> (usize, u64) {
        // Fibonacci hashing: neighbouring pages land far apart.
        let at = (u64::from(page).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize;
        (at / 64, 1 << (at % 64))
    }

    pub(super) fn set(&mut self, page: u32) {
        let (word, bit) = self.place(page);
        self.words[word] |= bit;
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.words.len() * 8
    }

    /// Whether the bit was set; clears it.
    pub(super) fn take(&mut self, page: u32) -> bool {
        let (word, bit) = self.place(page);
        let was = self.words[word] & bit != 0;
        self.words[word] &= !bit;
        was
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bit_is_taken_once_and_mostly_not_shared() {
        let mut bits = WroteBits::new(1000);
        (0..1000).for_each(|page| bits.set(page));
        assert!((0..1000).filter(|&page| bits.take(page)).count() > 700);
        assert!((0..1000).all(|page| !bits.take(page)));
    }
}
