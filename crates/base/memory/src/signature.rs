//! Computes page signatures that are linear over the erasure code's field.
//!
//! A page's checksum tells a reader that knows it whether the page is the stored one. Only the
//! donor of a parity knows the parity's checksum: the borrower keeps checksums of its own pages.
//! The borrower must still tell whether a parity belongs to the pages that it was made of, and no
//! page should travel for that. So donors compute an *algebraic signature* (Litwin and Schwarz,
//! "Algebraic Signatures for Scalable Distributed Data Structures", ICDE 2004): a sum of a page's
//! bytes with fixed weights, in the code's field. The signature is linear: the code, applied to the
//! pages' signatures, gives the signature of their parity (Schwarz and Miller, "Store, Forget, and
//! Check", ICDCS 2006). CRC32C is linear too, but not over this field.
//!
//! The signature detects every change within eight consecutive bytes, and misses one in 2^64 of
//! other changes. It does not replace the checksum: an attacker can change a page and keep the
//! signature.

use crate::PAGE_SIZE;

/// Eight sums of a page's bytes, over GF(2^8) with the polynomial 0x11d: of those whose place in
/// the page leaves the same remainder by eight.
pub type PageSignature = [u8; 8];

/// Lanes that are summed up on their own: the compiler makes vector code of that.
const LANES: usize = 8;

/// Weighs the words of a page by powers of 2, of which there are 255.
pub fn page_signature(page: &[u8; PAGE_SIZE]) -> PageSignature {
    let mut lanes = [0; LANES];
    for words in page.as_chunks::<{ 8 * LANES }>().0 {
        for (lane, word) in lanes.iter_mut().zip(words.as_chunks::<8>().0) {
            *lane = doubled(*lane) ^ u64::from_le_bytes(*word);
        }
    }
    // One lane follows the other, as if their words did.
    const WORDS_IN_LANE: usize = PAGE_SIZE / 8 / LANES;
    let total = lanes
        .into_iter()
        .fold(0, |total, lane| (0..WORDS_IN_LANE).fold(total, |total, _| doubled(total)) ^ lane);
    total.to_le_bytes()
}

/// Each of eight bytes times 2, in the field.
fn doubled(bytes: u64) -> u64 {
    const LOWEST: u64 = 0x0101_0101_0101_0101;
    let carried = bytes >> 7 & LOWEST;
    let reduced = carried ^ carried << 2 ^ carried << 3 ^ carried << 4;
    (bytes & !(LOWEST << 7)) << 1 ^ reduced
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SplitMix;

    fn page(seed: u64) -> [u8; PAGE_SIZE] {
        let mut mix = SplitMix::new(seed);
        let mut page = [0; PAGE_SIZE];
        page.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = mix.draw().to_le_bytes());
        page
    }

    #[test]
    fn doubling_is_that_of_the_field() {
        assert_eq!(doubled(0x8040_01ff_0000_0000), 0x1d80_02e3_0000_0000);
        // 2 generates all 255 elements but 0.
        let powers: std::collections::BTreeSet<u64> =
            std::iter::successors(Some(1), |power| Some(doubled(*power))).take(255).collect();
        assert_eq!(powers.len(), 255);
    }

    #[test]
    fn the_signature_of_a_sum_is_the_sum_of_signatures() {
        let (one, other) = (page(1), page(2));
        let mut both = one;
        both.iter_mut().zip(other).for_each(|(byte, other)| *byte ^= other);
        let sum: Vec<u8> =
            page_signature(&one).iter().zip(page_signature(&other)).map(|(a, b)| a ^ b).collect();
        assert_eq!(page_signature(&both)[..], sum);
        assert_eq!(page_signature(&[0; PAGE_SIZE]), [0; 8]);
    }

    #[test]
    fn a_change_within_eight_bytes_is_seen_wherever_it_is() {
        let whole = page(3);
        for at in 0..PAGE_SIZE - 8 {
            let mut changed = whole;
            let patch = page(at as u64 + 4);
            changed[at..at + 8].iter_mut().zip(patch).for_each(|(byte, patch)| *byte ^= patch | 1);
            assert_ne!(page_signature(&changed), page_signature(&whole), "byte {at}");
        }
    }
}
