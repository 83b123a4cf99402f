//! Memory of the bench's own programs, touched page by page at known moments.
//!
//! It is mapped for the purpose and not taken from the allocator, so that a page is resident only
//! if the program touched it, and its address says nothing about its neighbours.

use anyhow::Context as _;
use hecaton_memory::{PAGE_SIZE, SplitMix, pages_to_bytes};
use std::{fs::File, os::unix::fs::FileExt as _, ptr::NonNull};

const WORDS: usize = PAGE_SIZE / size_of::<u64>();

/// Private anonymous memory, as an allocator would map it.
pub(crate) struct Region {
    start: NonNull<u64>,
    pages: u64,
}

impl Region {
    pub(crate) fn new(pages: u64) -> anyhow::Result<Self> {
        let bytes = pages_to_bytes(pages) as usize;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // By libc, as an allocator does: what is mapped past it is found a tenth of a second later,
        // and a small region is filled by then.
        //
        // SAFETY: the kernel chooses the place, so no existing mapping is touched.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            let error = std::io::Error::last_os_error();
            return Err(error).with_context(|| format!("cannot map {bytes} bytes"));
        }
        let start = NonNull::new(start.cast()).context("the kernel mapped page zero")?;
        Ok(Self { start, pages })
    }

    /// Whether the kernel is to use huge pages.
    pub(crate) fn advise_huge(&self, is_huge: bool) -> anyhow::Result<()> {
        let advice = if is_huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        let bytes = pages_to_bytes(self.pages) as usize;
        // SAFETY: the range is this region's own mapping, and the advice does not change what is in
        // it.
        let result = unsafe { libc::madvise(self.start.as_ptr().cast(), bytes, advice) };
        if result != 0 {
            let error = std::io::Error::last_os_error();
            return Err(error).context("the kernel takes no advice on huge pages");
        }
        Ok(())
    }

    fn page(&self, page: u64) -> *mut u64 {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        // SAFETY: the page lies within the mapping, by the assertion above.
        unsafe { self.start.as_ptr().add(page as usize * WORDS) }
    }

    /// Reads the page's first word; exactly one access, which the compiler may not move.
    pub(crate) fn read(&self, page: u64) -> u64 {
        // SAFETY: `page` is mapped readable for as long as `self` lives, and only this thread
        // writes to it. Volatile because the access is the thing that is measured.
        unsafe { self.page(page).read_volatile() }
    }

    /// Writes the page's first word.
    pub(crate) fn write(&mut self, page: u64, word: u64) {
        // SAFETY: as in `read`; `&mut self` keeps others from reading meanwhile.
        unsafe { self.page(page).write_volatile(word) }
    }

    /// Overwrites the whole page.
    pub(crate) fn fill(&mut self, page: u64, words: &[u64; WORDS]) {
        // SAFETY: source and page are both `WORDS` long and cannot overlap: one is borrowed shared,
        // the other is this mapping, which hands out no references.
        unsafe { self.page(page).copy_from_nonoverlapping(words.as_ptr(), WORDS) }
    }

    /// Reads all of the page and adds its words up.
    pub(crate) fn sum(&self, page: u64) -> u64 {
        // SAFETY: the page is mapped, aligned and initialised (fresh pages are zeros), and nothing
        // writes to it while the slice is borrowed within this function.
        let words = unsafe { std::slice::from_raw_parts(self.page(page), WORDS) };
        words.iter().fold(0, |sum, word| sum.wrapping_add(*word))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let bytes = pages_to_bytes(self.pages) as usize;
        // SAFETY: the mapping is this region's own, and no reference into it outlives `self`.
        let unmapped = unsafe { libc::munmap(self.start.as_ptr().cast(), bytes) };
        debug_assert_eq!(unmapped, 0);
    }
}

/// Tells which pages of this process are in its memory, without touching them.
pub(crate) struct Residency(File);

impl Residency {
    pub(crate) fn open() -> anyhow::Result<Self> {
        File::open("/proc/self/pagemap").map(Self).context("cannot open /proc/self/pagemap")
    }

    /// Whether an access to the page would be served without a fault.
    pub(crate) fn is_resident(&self, region: &Region, page: u64) -> anyhow::Result<bool> {
        let mut entry = [0; 8];
        self.read(region, page, &mut entry)?;
        Ok(is_present(entry))
    }

    /// How many pages of the region are resident.
    pub(crate) fn resident_pages(&self, region: &Region) -> anyhow::Result<u64> {
        const AT_ONCE: u64 = 8192;
        let mut resident = 0;
        let mut entries = vec![0; AT_ONCE as usize * 8];
        for first in (0..region.pages).step_by(AT_ONCE as usize) {
            let pages = AT_ONCE.min(region.pages - first) as usize;
            self.read(region, first, &mut entries[..pages * 8])?;
            let (entries, _) = entries[..pages * 8].as_chunks();
            resident += entries.iter().filter(|entry| is_present(**entry)).count() as u64;
        }
        Ok(resident)
    }

    fn read(&self, region: &Region, page: u64, entries: &mut [u8]) -> anyhow::Result<()> {
        let number = region.page(page).addr() / PAGE_SIZE;
        self.0.read_exact_at(entries, number as u64 * 8).context("cannot read /proc/self/pagemap")
    }
}

/// Bit 63 of a pagemap entry (Documentation/admin-guide/mm/pagemap.rst).
fn is_present(entry: [u8; 8]) -> bool {
    u64::from_ne_bytes(entry) >> 63 == 1
}

/// A page that does not compress: the words of a random sequence.
pub(crate) fn noise(seed: u64) -> [u64; WORDS] {
    let mut random = SplitMix::new(seed);
    std::array::from_fn(|_| random.draw())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_touched_pages_are_resident() {
        let mut region = Region::new(64).unwrap();
        let residency = Residency::open().unwrap();
        assert!(!residency.is_resident(&region, 7).unwrap());
        region.fill(7, &noise(7));
        assert!(residency.is_resident(&region, 7).unwrap());
        assert!(residency.resident_pages(&region).unwrap() >= 1);
        assert_eq!(region.read(7), noise(7)[0]);
        let sum = noise(7).iter().fold(0_u64, |sum, word| sum.wrapping_add(*word));
        assert_eq!(region.sum(7), sum);
    }

    #[test]
    #[should_panic(expected = "page 64 of 64")]
    fn a_page_beyond_the_end_is_refused() {
        Region::new(64).unwrap().read(64);
    }
}
