//! An application of a harvest VM: it fills all the memory that it may have, and gives it back in
//! an order that has nothing to do with the one in which it took it.
//!
//! A hook tells it its limit, as any application without an adapter. Both use two files in a
//! directory: `limit` is the memory that it may have, `held` the memory that it has, both in bytes.
//! Two of its parts take their pages in turns, as programs do that run at the same time. When the
//! application gives half of its memory back in small pages, half of that is in whole 2 MiB. Figure
//! 9 of "Memory-Harvesting VMs in Cloud Platforms" (2022) shows the same (17.8 of 35.9 GB).

use crate::bench::measure::region::{Region, noise};
use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use hecaton_memory::{PAGE_SIZE, SplitMix};
use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

/// Arguments of `application`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where the two files are.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// The pages that the program allocates.
    #[arg(long, value_enum)]
    pages: Pages,
}

/// The size of an application's pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(in crate::bench) enum Pages {
    /// 4 KiB.
    Small,
    /// 2 MiB, as far as the kernel has them.
    Huge,
}

/// A part that is taken and given back as a whole: a huge page's size.
pub(in crate::bench) const PART_BYTES: u64 = 2 << 20;

const PART_PAGES: u64 = PART_BYTES / PAGE_SIZE as u64;

/// Parts that are filled between two looks at the limit.
const AT_ONCE: u64 = 16;

/// Between two looks at a limit that is kept to.
const TICK: Duration = Duration::from_millis(5);

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let mut application = Application::new(args.pages);
    let mut told = None;
    loop {
        let limit = limit_bytes(&args.dir.join("limit"))?;
        let is_done = application.approach(limit / PART_BYTES)?;
        let held = application.parts.len() as u64 * PART_BYTES;
        if told != Some(held) {
            replace(&args.dir, "held", &held.to_string())?;
            told = Some(held);
        }
        if is_done {
            thread::sleep(TICK);
        }
    }
}

/// Nothing, until somebody has said something.
fn limit_bytes(path: &Path) -> anyhow::Result<u64> {
    if !path.exists() {
        return Ok(0);
    }
    let text = fs::read_to_string(path)?;
    text.trim().parse().with_context(|| format!("{} says {text:?}", path.display()))
}

/// So that nobody reads half of it.
fn replace(dir: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    let new = dir.join(format!("{name}.new"));
    fs::write(&new, text)?;
    Ok(fs::rename(new, dir.join(name))?)
}

struct Application {
    pages: Pages,
    parts: Vec<Part>,
    /// Parts there have ever been.
    count: u64,
    random: SplitMix,
}

struct Part {
    number: u64,
    region: Region,
}

impl Application {
    fn new(pages: Pages) -> Self {
        Self { pages, parts: Vec::new(), count: 0, random: SplitMix::new(1) }
    }

    /// Goes towards so many parts; whether it has them.
    fn approach(&mut self, parts: u64) -> anyhow::Result<bool> {
        let held = self.parts.len() as u64;
        if held < parts {
            self.take((parts - held).min(AT_ONCE))?;
        } else {
            (parts..held).try_for_each(|_| self.give_back_one())?;
        }
        Ok(self.parts.len() as u64 == parts)
    }

    fn take(&mut self, parts: u64) -> anyhow::Result<()> {
        let first = self.parts.len();
        for _ in 0..parts {
            let region = Region::new(PART_PAGES)?;
            region.advise_huge(self.pages == Pages::Huge)?;
            self.parts.push(Part { number: self.count, region });
            self.count += 1;
        }
        let mut block = noise(self.count);
        for two in self.parts[first..].chunks_mut(2) {
            for page in 0..PART_PAGES {
                for part in &mut *two {
                    block[0] = stamp(part.number, page);
                    part.region.fill(page, &block);
                }
            }
        }
        Ok(())
    }

    /// Looks whether all is in it still: the kernel may have moved it about.
    fn give_back_one(&mut self) -> anyhow::Result<()> {
        let which = self.random.draw() % self.parts.len() as u64;
        let part = self.parts.swap_remove(which as usize);
        for page in 0..PART_PAGES {
            let found = part.region.read(page);
            ensure!(found == stamp(part.number, page), "page {page} of a part holds {found:x}");
        }
        Ok(())
    }
}

const fn stamp(part: u64, page: u64) -> u64 {
    part * PART_PAGES + page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_takes_what_it_may_have_and_gives_it_back() {
        for pages in [Pages::Small, Pages::Huge] {
            let mut application = Application::new(pages);
            assert!(!application.approach(AT_ONCE + 2).unwrap(), "it looks at the limit meanwhile");
            assert!(application.approach(AT_ONCE + 2).unwrap());
            assert_eq!(application.parts.len() as u64, AT_ONCE + 2);
            assert!(application.approach(3).unwrap());
            assert_eq!(application.parts.len(), 3);
            application.parts[1].region.write(7, 1);
            assert!(application.approach(0).is_err(), "a page was lost");
        }
    }

    #[test]
    fn a_limit_is_read_once_it_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("limit");
        assert_eq!(limit_bytes(&path).unwrap(), 0);
        replace(dir.path(), "limit", "4194304\n").unwrap();
        assert_eq!(limit_bytes(&path).unwrap(), 4 << 20);
        replace(dir.path(), "limit", "much").unwrap();
        assert!(limit_bytes(&path).is_err());
    }
}
