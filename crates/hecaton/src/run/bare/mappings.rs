//! Reads the mappings of a stopped program, and finds free addresses near its text.
//!
//! Pure but for [`read`].

use std::fs;
use std::ops::Range;

const PAGE: u64 = 4096;

/// The default of `vm.mmap_min_addr`.
const LOWEST: u64 = 1 << 16;

/// A jump reaches 2 GiB. The other half covers the text itself.
const REACH: u64 = 1 << 30;

/// A line of `/proc/PID/maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) span: Range<u64>,
    /// The mapping is executable and maps a file.
    pub(super) is_text: bool,
}

/// The mappings of a process, in order of address.
pub(super) fn read(pid: u32) -> std::io::Result<Vec<Mapping>> {
    Ok(parse(&fs::read_to_string(format!("/proc/{pid}/maps"))?))
}

fn parse(text: &str) -> Vec<Mapping> {
    let parse = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let rights = fields.next()?;
        let inode = fields.nth(2)?;
        let hex = |digits| u64::from_str_radix(digits, 16).ok();
        let is_text = rights.as_bytes().get(2) == Some(&b'x') && inode != "0";
        Some(Mapping { span: hex(start)?..hex(end)?, is_text })
    };
    text.lines().filter_map(parse).collect()
}

/// A free page-aligned address for `len` bytes below the mapping that begins at `text`, and within
/// the reach of a jump. Above a program its heap grows (`brk`), below it nothing does.
pub(super) fn room_below(mappings: &[Mapping], text: u64, len: u64) -> Option<u64> {
    let len = len.next_multiple_of(PAGE);
    let mut end = text;
    for mapping in mappings.iter().rev().filter(|mapping| mapping.span.start < text) {
        if mapping.span.end < end && end - mapping.span.end >= len + 2 * PAGE {
            break;
        }
        end = end.min(mapping.span.start);
    }
    // A page is left free on either side.
    let start = end.checked_sub(len + PAGE)?;
    (start >= LOWEST && text - start < REACH).then_some(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_files_is_told_from_other_memory() {
        let mappings = parse(
            "400000-401000 r--p 00000000 fe:00 7    /bin/static\n\
             401000-480000 r-xp 00001000 fe:00 7    /bin/static\n\
             7ffff7ff9000-7ffff7ffd000 r--p 00000000 00:00 0    [vvar]\n\
             7ffff7ffd000-7ffff7fff000 r-xp 00000000 00:00 0    [vdso]\n",
        );
        let text: Vec<_> = mappings.iter().map(|mapping| mapping.is_text).collect();
        assert_eq!(text, [false, true, false, false]);
        assert_eq!(mappings[1].span, 0x40_1000..0x48_0000);
    }

    #[test]
    fn room_is_below_the_text_in_the_first_hole() {
        let mapping = |span| Mapping { span, is_text: false };
        let mappings = [
            mapping(0x10_0000..0x20_0000),
            mapping(0x3f_e000..0x40_0000),
            mapping(0x40_0000..0x50_0000),
        ];
        assert_eq!(room_below(&mappings, 0x40_0000, 1), Some(0x3f_c000));
        assert_eq!(room_below(&mappings[..1], 0x40_0000, PAGE), Some(0x3f_e000));
        assert_eq!(room_below(&mappings[2..], 0x40_0000, PAGE), Some(0x3f_e000));
        // No page would be free beside the room.
        let close = [mapping(0x10_0000..0x3f_e000), mapping(0x40_0000..0x50_0000)];
        assert_eq!(room_below(&close, 0x40_0000, PAGE), Some(0xf_e000));
        assert_eq!(room_below(&[], LOWEST, PAGE), None);
        assert_eq!(room_below(&[mapping(LOWEST..0x40_0000)], 0x40_0000, PAGE), None);
    }
}
