//! The end-to-end checksum of a page, and the test for a page of zeros.

use crate::PAGE_SIZE;

/// CRC32C of a page's 4096 bytes.
pub type PageSum = u32;

/// The checksum that travels with a page from the borrower to the donor and back.
pub fn page_sum(page: &[u8]) -> PageSum {
    debug_assert_eq!(page.len(), PAGE_SIZE);
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, page) as u32
}

/// The sum of a page of zeros.
pub const ZERO_PAGE_SUM: PageSum = 0x98f9_4189;

/// Whether the page holds nothing but zeros, and so need be neither stored nor sent.
pub fn is_zero(page: &[u8]) -> bool {
    // A dirty page nearly always shows itself in its first words; the rest is read 64 bytes at a
    // time, which the compiler turns into vector code.
    let (chunks, rest) = page.as_chunks::<64>();
    rest.iter().all(|&byte| byte == 0)
        && chunks.iter().all(|chunk| chunk.iter().fold(0, |seen, &byte| seen | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sum_is_crc32c() {
        // RFC 3720, appendix B.4, gives 32 bytes of zeros; 4096 zeros from the same polynomial.
        assert_eq!(crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &[0; 32]), 0x8a91_36aa);
        assert_eq!(page_sum(&[0; PAGE_SIZE]), ZERO_PAGE_SUM);
    }

    #[test]
    fn one_bit_anywhere_is_seen() {
        let mut page = [0u8; PAGE_SIZE];
        assert!(is_zero(&page));
        let zero_sum = page_sum(&page);
        for at in [0, 1, 63, 64, 2048, PAGE_SIZE - 1] {
            page[at] = 1;
            assert!(!is_zero(&page));
            assert_ne!(page_sum(&page), zero_sum);
            page[at] = 0;
        }
    }
}
