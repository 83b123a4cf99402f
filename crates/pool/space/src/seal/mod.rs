//! Pages that donors can neither read nor alter: AES-256-GCM (NIST SP 800-38D), with a key that
//! only their owner has.
//!
//! A donor stores the ciphertext like any page. It is as long as the page, so the protocol and the
//! donors' copying of pages know nothing of it. The [`Seal`] does not fit in, and stays with the
//! owner. So the owner can tell whether it gets back what was sealed *last* under this page's
//! number. A tag beside the page could not tell that.
//!
//! GCM fails altogether when two contents are sealed with one key and one nonce. Here a nonce is
//! the page's number and a version. The owner must never give out a version twice under one key,
//! even if a process is killed. Nonces are not random: then a key would be good for 2^32 pages
//! only, which a busy machine writes in a day.

pub mod table;

use hecaton_memory::PageNo;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use std::fmt;

/// Bytes of a key.
pub const KEY_BYTES: usize = 32;

/// Bytes of a tag.
pub const TAG_BYTES: usize = 16;

/// Everything that opens a sealed page, except the key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seal {
    /// Which of all pages ever sealed with the key it is.
    pub version: u64,
    /// Tag that shows that nothing was altered.
    pub tag: [u8; TAG_BYTES],
}

/// The page is not what was sealed: it was altered, or is another page, or an older version.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("what came back under page {0} is not what was last sealed there")]
pub struct Altered(pub PageNo);

/// Seals and opens the pages of one space.
pub struct Sealer(LessSafeKey);

impl Sealer {
    /// With this key.
    pub fn new(key: &[u8; KEY_BYTES]) -> Sealer {
        let key =
            UnboundKey::new(&AES_256_GCM, key).expect("the key is as long as the cipher's are");
        Sealer(LessSafeKey::new(key))
    }

    /// Turns a page's contents into what donors may have.
    ///
    /// `version` must not have been given here before, with this key, be it for another page.
    ///
    /// # Panics
    /// If the page's number is not below 2^32, the end of a space of 16 TiB.
    pub fn seal(&self, page: PageNo, version: u64, contents: &mut [u8]) -> Seal {
        let sealed =
            self.0.seal_in_place_separate_tag(nonce(page, version), Aad::empty(), contents);
        let tag = sealed.expect("pages are shorter than GCM's limit of 64 GiB");
        let tag = tag.as_ref().try_into().expect("the cipher's tags have this length");
        Seal { version, tag }
    }

    /// Turns it back.
    ///
    /// # Errors
    /// [`Altered`]; then what is left in `contents` means nothing.
    ///
    /// # Panics
    /// As [`Sealer::seal`].
    pub fn open(&self, page: PageNo, seal: &Seal, contents: &mut [u8]) -> Result<(), Altered> {
        let (nonce, tag) = (nonce(page, seal.version), Tag::from(seal.tag));
        let opened = self.0.open_in_place_separate_tag(nonce, Aad::empty(), tag, contents, 0..);
        opened.map(drop).map_err(|_| Altered(page))
    }
}

/// Says nothing of the key.
impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sealer")
    }
}

fn nonce(page: PageNo, version: u64) -> Nonce {
    let page = u32::try_from(page).expect("a sealed space has at most 2^32 pages");
    let mut bytes = [0; NONCE_LEN];
    bytes[..4].copy_from_slice(&page.to_be_bytes());
    bytes[4..].copy_from_slice(&version.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_memory::PAGE_SIZE;
    use proptest::prelude::*;

    const KEY: [u8; KEY_BYTES] = [7; KEY_BYTES];

    fn page_of(byte: u8) -> Vec<u8> {
        (0..PAGE_SIZE).map(|at| byte ^ (at % 251) as u8).collect()
    }

    /// A published test case of the cipher (McGrew and Viega, "The Galois/Counter Mode of
    /// Operation", case 14). It seals a block of zeros under a key of zeros, with page 0 and
    /// version 0 for a nonce of zeros.
    #[test]
    fn it_is_aes_256_gcm() {
        let mut contents = [0; 16];
        let seal = Sealer::new(&[0; KEY_BYTES]).seal(0, 0, &mut contents);
        assert_eq!(u128::from_be_bytes(contents), 0xcea7_403d_4d60_6b6e_074e_c5d3_baf3_9d18);
        assert_eq!(u128::from_be_bytes(seal.tag), 0xd0d1_c8a7_9999_6bf0_265b_98b5_d48a_b919);
    }

    #[test]
    fn a_page_comes_back_as_it_was() {
        let (sealer, contents) = (Sealer::new(&KEY), page_of(1));
        let mut page = contents.clone();
        let seal = sealer.seal(9, 1, &mut page);
        assert_ne!(page, contents);
        assert_eq!(sealer.open(9, &seal, &mut page), Ok(()));
        assert_eq!(page, contents);
    }

    #[test]
    fn equal_pages_look_different() {
        let sealer = Sealer::new(&KEY);
        let (mut one, mut two) = (page_of(1), page_of(1));
        sealer.seal(3, 1, &mut one);
        sealer.seal(3, 2, &mut two);
        assert_ne!(one, two);
    }

    #[test]
    fn a_change_of_any_byte_is_seen() {
        let sealer = Sealer::new(&KEY);
        let mut sealed = page_of(1);
        let seal = sealer.seal(9, 1, &mut sealed);
        for at in 0..PAGE_SIZE {
            let mut altered = sealed.clone();
            altered[at] ^= 1 << (at % 8);
            assert_eq!(sealer.open(9, &seal, &mut altered), Err(Altered(9)), "byte {at}");
        }
        for at in 0..TAG_BYTES {
            let mut other = seal;
            other.tag[at] ^= 0x80;
            assert_eq!(sealer.open(9, &other, &mut sealed.clone()), Err(Altered(9)), "tag {at}");
        }
    }

    #[test]
    fn another_key_opens_nothing_and_nothing_shows_the_key() {
        let mut sealed = page_of(1);
        let seal = Sealer::new(&KEY).seal(9, 1, &mut sealed);
        let other = Sealer::new(&[8; KEY_BYTES]);
        assert_eq!(other.open(9, &seal, &mut sealed), Err(Altered(9)));
        assert_eq!(format!("{other:?}"), "Sealer");
    }

    #[test]
    #[should_panic(expected = "2^32 pages")]
    fn a_page_beyond_the_nonce_is_not_sealed() {
        Sealer::new(&KEY).seal(1 << 32, 1, &mut page_of(1));
    }

    proptest! {
        /// Donors may give another page, give an older version of the same page, or change bits.
        #[test]
        fn nothing_else_is_taken_for_the_page(
            pages in prop::collection::vec(0..4u64, 2..24),
            given in any::<prop::sample::Index>(),
            asked in any::<prop::sample::Index>(),
            flips in prop::collection::vec((0..PAGE_SIZE, 0..8u32), 0..3),
        ) {
            let sealer = Sealer::new(&KEY);
            let mut held = Vec::new();
            for (version, &page) in (1..).zip(&pages) {
                let mut contents = page_of(version as u8);
                let seal = sealer.seal(page, version, &mut contents);
                held.push((page, seal, contents));
            }
            let (given, asked) = (given.index(held.len()), asked.index(held.len()));
            let (page, seal, _) = &held[asked];
            let mut contents = held[given].2.clone();
            flips.iter().for_each(|&(at, bit)| contents[at] ^= 1 << bit);
            let is_same = given == asked && contents == held[asked].2;
            let opened = sealer.open(*page, seal, &mut contents);
            prop_assert_eq!(opened.is_ok(), is_same);
            if is_same {
                prop_assert_eq!(contents, page_of(asked as u8 + 1));
            }
        }
    }
}
