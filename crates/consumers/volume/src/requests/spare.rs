//! Buffers that nobody uses, for the next requests.

/// So much of each is kept.
const KEPT_BYTES: usize = 1 << 20;

pub(crate) struct Spare {
    buffers: Vec<Vec<u8>>,
    most: usize,
}

impl Spare {
    /// Keeps so many at most.
    pub(crate) fn new(most: usize) -> Spare {
        Spare { buffers: Vec::new(), most }
    }

    /// A buffer of at least so many bytes.
    pub(crate) fn take(&mut self, bytes: usize) -> Vec<u8> {
        let mut buffer = self.buffers.pop().unwrap_or_default();
        if buffer.len() < bytes {
            buffer.resize(bytes, 0);
        }
        buffer
    }

    pub(crate) fn keep(&mut self, mut buffer: Vec<u8>) {
        if self.buffers.len() < self.most && buffer.capacity() > 0 {
            buffer.truncate(KEPT_BYTES);
            buffer.shrink_to(KEPT_BYTES);
            self.buffers.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_are_kept_and_none_is_long() {
        let mut spare = Spare::new(2);
        for bytes in [3 * KEPT_BYTES, 0, 7, 9] {
            spare.keep(vec![1; bytes]);
        }
        assert_eq!(spare.buffers.len(), 2);
        assert!(spare.buffers.iter().all(|buffer| buffer.capacity() <= KEPT_BYTES));
        assert_eq!(spare.take(20).len(), 20);
        assert_eq!(spare.take(5).len(), KEPT_BYTES);
        assert!(spare.take(0).is_empty(), "there is none");
    }
}
