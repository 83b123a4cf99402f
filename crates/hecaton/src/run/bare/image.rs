//! Reads `libhecaton.so` and relocates it to an address, as a dynamic linker does.
//!
//! Pure: the file's bytes come in as an argument. A bare program has no glibc, so every symbol of
//! glibc is bound to one function of the library, which ends the program.

use anyhow::{Context as _, bail, ensure};
use hecaton_uffd::bare::{ENTER, MISSING};
use std::ops::Range;

const PAGE: u64 = 4096;

/// Largest size of the library in memory, in bytes: ten times today's.
const MAX_SPAN: u64 = 16 << 20;

const PT_LOAD: u32 = 1;
const SHT_RELA: u32 = 4;
const SHT_DYNSYM: u32 = 11;
const SHF_ALLOC: u64 = 2;
/// Section types of relocations that this module does not read: REL and RELR.
const OTHER_RELOCATIONS: [u32; 2] = [9, 19];

const R_64: u32 = 1;
const R_GLOB_DAT: u32 = 6;
const R_JUMP_SLOT: u32 = 7;
const R_RELATIVE: u32 = 8;
/// Relocations of thread-local variables. No code that runs in a bare program uses one.
const R_THREAD_LOCAL: [u32; 3] = [16, 17, 18];

const STB_WEAK: u8 = 2;

/// The library, read from its file and not relocated.
pub(super) struct Image {
    bytes: Vec<u8>,
    parts: Vec<Part>,
    relocations: Vec<Relocation>,
    enter: u64,
}

/// A run of pages with the same protection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Offsets from the library's start, in bytes.
    pub(super) span: Range<u64>,
    /// `PROT_*` bits.
    pub(super) protection: i32,
}

struct Relocation {
    at: u64,
    value: Value,
}

enum Value {
    /// An address in the library, by its offset.
    Offset(u64),
    Zero,
}

#[derive(Clone, Copy)]
struct Symbol {
    is_weak: bool,
    /// `None` if another library defines the symbol.
    value: Option<u64>,
}

impl Image {
    pub(super) fn parse(file: &[u8]) -> anyhow::Result<Image> {
        ensure!(file.starts_with(b"\x7fELF\x02\x01"), "it is no 64-bit ELF file");
        let (mut bytes, parts) = segments(file)?;
        let sections = sections(file)?;
        let find = |wanted: u32| sections.iter().find(|section| section.kind == wanted);
        let other = sections.iter().any(|section| OTHER_RELOCATIONS.contains(&section.kind));
        ensure!(!other, "it has relocations of another kind than expected");
        let symbols = find(SHT_DYNSYM).context("it has no dynamic symbols")?;
        let names = sections.get(symbols.link as usize).context("its symbols have no names")?;
        let names = slice(file, names.offset, names.len)?;
        let symbols = slice(file, symbols.offset, symbols.len)?.as_chunks::<24>().0;
        let (enter, missing) =
            (exported(symbols, names, ENTER)?, exported(symbols, names, MISSING)?);
        let mut relocations = Vec::new();
        for section in sections.iter().filter(|one| one.kind == SHT_RELA && one.is_loaded) {
            for entry in slice(file, section.offset, section.len)?.as_chunks::<24>().0 {
                let at = word(entry, 0)?;
                ensure!(at <= bytes.len() as u64 - 8, "a relocation is outside of it");
                let value = value_of(entry, symbols, missing)?;
                relocations.push(Relocation { at, value });
            }
        }
        bytes.shrink_to_fit();
        Ok(Image { bytes, parts, relocations, enter })
    }

    /// Bytes in memory, a multiple of the page size.
    pub(super) fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The offset of [`ENTER`].
    pub(super) fn enter(&self) -> u64 {
        self.enter
    }

    /// The contents, relocated to the address `base`.
    pub(super) fn at(&self, base: u64) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        for relocation in &self.relocations {
            let value = match relocation.value {
                Value::Offset(offset) => base.wrapping_add(offset),
                Value::Zero => 0,
            };
            let at = relocation.at as usize;
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }
}

/// The contents of all segments, each at its offset in memory, and their pages.
fn segments(file: &[u8]) -> anyhow::Result<(Vec<u8>, Vec<Part>)> {
    let (table, size, count) = (word(file, 32)?, half(file, 54)?, half(file, 56)?);
    let (mut bytes, mut parts) = (Vec::new(), Vec::new());
    for number in 0..u64::from(count) {
        let header = slice(file, table + number * u64::from(size), 56)?;
        if double(header, 0)? != PT_LOAD {
            continue;
        }
        let (from, at) = (word(header, 8)?, word(header, 16)?);
        let (in_file, in_memory) = (word(header, 32)?, word(header, 40)?);
        let end = at.checked_add(in_memory.max(in_file)).filter(|&end| end <= MAX_SPAN);
        let end = end.context("it is larger than expected")?.next_multiple_of(PAGE);
        let start = at / PAGE * PAGE;
        ensure!(start as usize >= bytes.len(), "its segments overlap");
        bytes.resize(end as usize, 0);
        bytes[at as usize..][..in_file as usize].copy_from_slice(slice(file, from, in_file)?);
        parts.push(Part { span: start..end, protection: protection(double(header, 4)?) });
    }
    ensure!(!parts.is_empty(), "it has nothing to load");
    Ok((bytes, parts))
}

fn protection(flags: u32) -> i32 {
    let right = |flag: u32, right: i32| if flags & flag != 0 { right } else { 0 };
    right(4, libc::PROT_READ) | right(2, libc::PROT_WRITE) | right(1, libc::PROT_EXEC)
}

struct Section {
    kind: u32,
    is_loaded: bool,
    offset: u64,
    len: u64,
    link: u32,
}

fn sections(file: &[u8]) -> anyhow::Result<Vec<Section>> {
    let (table, size, count) = (word(file, 40)?, half(file, 58)?, half(file, 60)?);
    let read = |number: u16| {
        let header = slice(file, table + u64::from(number) * u64::from(size), 64)?;
        anyhow::Ok(Section {
            kind: double(header, 4)?,
            is_loaded: word(header, 8)? & SHF_ALLOC != 0,
            offset: word(header, 24)?,
            len: word(header, 32)?,
            link: double(header, 40)?,
        })
    };
    (0..count).map(read).collect()
}

fn exported(symbols: &[[u8; 24]], names: &[u8], name: &str) -> anyhow::Result<u64> {
    let is_it = |symbol: &&[u8; 24]| {
        let rest = double(*symbol, 0).ok().and_then(|at| names.get(at as usize..));
        rest.and_then(|rest| rest.split(|&byte| byte == 0).next()) == Some(name.as_bytes())
    };
    let symbol = symbols.iter().find(is_it).and_then(|symbol| read_symbol(symbol).value);
    symbol.with_context(|| format!("it has no function `{name}`: is it of another version?"))
}

fn read_symbol(symbol: &[u8; 24]) -> Symbol {
    let value = u64::from_le_bytes(*symbol[8..].first_chunk().expect("24 bytes"));
    let is_defined = symbol[6] != 0 || symbol[7] != 0;
    Symbol { is_weak: symbol[4] >> 4 == STB_WEAK, value: is_defined.then_some(value) }
}

fn value_of(entry: &[u8; 24], symbols: &[[u8; 24]], missing: u64) -> anyhow::Result<Value> {
    let (kind, symbol, addend) = (double(entry, 8)?, double(entry, 12)?, word(entry, 16)?);
    let symbol = symbols.get(symbol as usize).map(read_symbol).context("a symbol is missing")?;
    Ok(match kind {
        R_RELATIVE => Value::Offset(addend),
        R_64 | R_GLOB_DAT | R_JUMP_SLOT => {
            // The latter two have no addend.
            let addend = if kind == R_64 { addend } else { 0 };
            match symbol {
                Symbol { value: Some(value), .. } => Value::Offset(value.wrapping_add(addend)),
                Symbol { is_weak: true, .. } => Value::Zero,
                Symbol { .. } => Value::Offset(missing),
            }
        }
        kind if R_THREAD_LOCAL.contains(&kind) => Value::Zero,
        kind => bail!("it has a relocation of an unexpected kind: {kind}"),
    })
}

fn slice(bytes: &[u8], at: u64, len: u64) -> anyhow::Result<&[u8]> {
    let end = at.checked_add(len);
    let found = end.and_then(|end| bytes.get(usize::try_from(at).ok()?..end as usize));
    found.context("it is cut off")
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> anyhow::Result<[u8; N]> {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().context("it is cut off")
}

fn half(bytes: &[u8], at: usize) -> anyhow::Result<u16> {
    array(bytes, at).map(u16::from_le_bytes)
}

fn double(bytes: &[u8], at: usize) -> anyhow::Result<u32> {
    array(bytes, at).map(u32::from_le_bytes)
}

fn word(bytes: &[u8], at: usize) -> anyhow::Result<u64> {
    array(bytes, at).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbol(weak: bool, section: u16, value: u64) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[4] = if weak { STB_WEAK << 4 } else { 1 << 4 };
        bytes[6..8].copy_from_slice(&section.to_le_bytes());
        bytes[8..16].copy_from_slice(&value.to_le_bytes());
        bytes
    }

    fn relocation(kind: u32, symbol: u32, addend: u64) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[8..12].copy_from_slice(&kind.to_le_bytes());
        bytes[12..16].copy_from_slice(&symbol.to_le_bytes());
        bytes[16..].copy_from_slice(&addend.to_le_bytes());
        bytes
    }

    #[test]
    fn relocations_bind_to_the_library_or_to_what_tells_of_the_mistake() {
        let symbols =
            [symbol(false, 0, 0), symbol(false, 7, 0x100), symbol(true, 0, 0), symbol(false, 0, 0)];
        let value = |kind, symbol, addend| match value_of(
            &relocation(kind, symbol, addend),
            &symbols,
            0x900,
        ) {
            Ok(Value::Offset(offset)) => Some(offset),
            Ok(Value::Zero) => Some(0),
            Err(_) => None,
        };
        assert_eq!(value(R_RELATIVE, 0, 0x40), Some(0x40));
        assert_eq!(value(R_64, 1, 8), Some(0x108));
        assert_eq!(value(R_GLOB_DAT, 1, 8), Some(0x100));
        assert_eq!(value(R_GLOB_DAT, 2, 0), Some(0), "weak and not there");
        assert_eq!(value(R_JUMP_SLOT, 3, 0), Some(0x900), "of glibc");
        assert_eq!(value(16, 0, 0), Some(0));
        assert_eq!(value(37, 0, 0), None, "IRELATIVE");
        assert_eq!(value(R_64, 4, 0), None, "no such symbol");
    }

    #[test]
    fn the_library_is_read_and_moves_with_its_base() {
        let test = std::env::current_exe().unwrap();
        let library = test.ancestors().nth(2).unwrap().join("libhecaton.so");
        if !library.is_file() {
            println!("skipped: the_library_is_read_and_moves_with_its_base: it is not built");
            return;
        }
        let file = std::fs::read(library).unwrap();
        let image = Image::parse(&file).unwrap();
        assert!(image.enter() > 0 && image.len().is_multiple_of(PAGE));
        let text = image.parts().iter().find(|part| part.span.contains(&image.enter())).unwrap();
        assert_eq!(text.protection, libc::PROT_READ | libc::PROT_EXEC);
        assert!(image.parts().windows(2).all(|two| two[0].span.end <= two[1].span.start));
        let (low, high) = (image.at(0x10000), image.at(0x20000));
        let first = image.relocations.iter().find_map(|one| match one.value {
            Value::Offset(offset) => Some((one.at as usize, offset)),
            Value::Zero => None,
        });
        let (at, offset) = first.unwrap();
        assert_eq!(word(&low, at).unwrap(), 0x10000 + offset);
        assert_eq!(word(&high, at).unwrap(), 0x20000 + offset);
        for length in (0..file.len()).step_by(997) {
            assert!(Image::parse(&file[..length]).is_err(), "{length} bytes");
        }
    }
}
