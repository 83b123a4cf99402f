//! Defines the command-line options for the pool: copies, donors, ranges of a VM's RAM.

use crate::terminal::failure::usage;
use hecaton_memory::Size;
use hecaton_node::socket::message::{CreateVolume, Wanted};
use hecaton_pager::{Placement, RamRange};
use hecaton_space::{Code, Cold};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Default time that donors keep the memory, in seconds.
const DEFAULT_LEASE_S: u64 = 60;

/// Default rate at which donors compare copies.
const DEFAULT_SCRUB: ScrubRate = ScrubRate(hecaton_pager::SCRUB_BYTES_PER_S);

/// Default rate at which donors make copies, in bytes a second.
const DEFAULT_COPYING: Size = Size(hecaton_pager::COPYING_BYTES_PER_S);

/// Default time that a donor may be silent before other copies take its place.
const DEFAULT_FAILOVER_MS: u64 = hecaton_space::FAILOVER.as_millis() as u64;

/// How many copies, where, and whether encrypted, for programs, machines and volumes.
#[derive(clap::Args)]
pub(crate) struct CopyArgs {
    /// Copies of each page in the pool, at different donors and on different hosts where there are
    /// several: with 2 or 3, nothing is lost with a donor [default: the node's, or else 1]
    #[arg(long, value_name = "N")]
    pub(crate) mirror: Option<u8>,
    /// Uses these donors only
    #[arg(long, value_name = "DONOR,...", value_delimiter = ',')]
    pub(crate) donors: Vec<String>,
    /// Bytes that donors may read in a second, all together, to compare the copies of pages with
    /// `--mirror` and mend what has gone bad; with `off`, only what came back wrong is looked at
    #[arg(long, value_name = "SIZE", default_value_t = DEFAULT_SCRUB)]
    scrub: ScrubRate,
    /// Bytes that donors may copy to each other in a second, all together, when copies are made
    /// anew after a loss, or pages move to another donor
    #[arg(long, value_name = "SIZE", default_value_t = DEFAULT_COPYING)]
    copying: Size,
    /// Milliseconds that a donor may be silent before other copies take its place, with `--mirror`.
    /// Its copies are made anew then: give more where hosts or their network are often busy for
    /// longer
    #[arg(long, value_name = "MILLISECONDS", default_value_t = DEFAULT_FAILOVER_MS,
          value_parser = clap::value_parser!(u64).range(20..=60_000))]
    failover: u64,
    /// Encrypts pages before they leave this host, with a key that never does: donors can neither
    /// read nor alter them
    #[arg(long)]
    pub(crate) encrypt: bool,
}

impl CopyArgs {
    /// Converts the options into those of a new volume.
    pub(crate) fn of_volume(self) -> CreateVolume {
        CreateVolume {
            copies: self.mirror,
            scrub_bytes_per_s: Some(self.scrub_bytes_per_s()),
            copying_bytes_per_s: Some(self.copying_bytes_per_s()),
            failover_ms: Some(self.failover),
            encrypt: self.encrypt,
            donors: self.donors,
            ..CreateVolume::default()
        }
    }

    /// Scrub rate in bytes a second; 0 disables the scrub.
    pub(crate) fn scrub_bytes_per_s(&self) -> u64 {
        self.scrub.0
    }

    /// Rate at which copies are made, in bytes a second.
    pub(crate) fn copying_bytes_per_s(&self) -> u64 {
        self.copying.0
    }
}

/// Arguments of programs and machines that choose their part of the pool.
#[derive(clap::Args)]
pub(crate) struct PoolArgs {
    #[command(flatten)]
    copies: CopyArgs,
    /// Seconds that a donor may be away: a program that wants a page that only donors have that are
    /// away for longer is ended, a machine is stopped
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    donor_patience: u64,
    /// Seconds that donors keep the memory without hearing from this host: for so long it may be
    /// cut off from them and lose nothing, and so long they wait for their memory if it is gone
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_LEASE_S,
          value_parser = clap::value_parser!(u64).range(8..=86_400))]
    lease: u64,
    /// Keeps memory that has gone cold in an erasure code instead of copies, which takes less room:
    /// with 4+2, four segments of 16 MiB and two parities are at six donors, any two of which may
    /// be lost. Copies are made again when it is written
    #[arg(long, value_name = "SEGMENTS+PARITIES", requires = "mirror")]
    ec: Option<Code>,
    /// Seconds that all segments of a stripe must have been left alone until they are coded, with
    /// `--ec`
    #[arg(long, value_name = "SECONDS", default_value_t = 600, requires = "ec",
          value_parser = clap::value_parser!(u64).range(1..=604_800))]
    cold_after: u64,
}

/// Scrub rate in bytes a second; 0 disables the scrub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ScrubRate(u64);

impl fmt::Display for ScrubRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("off"),
            bytes => Size(bytes).fmt(f),
        }
    }
}

impl FromStr for ScrubRate {
    type Err = String;

    fn from_str(text: &str) -> Result<ScrubRate, String> {
        match text {
            "off" => Ok(ScrubRate(0)),
            text => text
                .parse::<Size>()
                .map(|size| ScrubRate(size.0))
                .map_err(|error| format!("{error}; or write `off`")),
        }
    }
}

/// Donors for parts of a machine's RAM.
#[derive(clap::Args)]
pub(crate) struct RangeArgs {
    /// Backs parts of the machine's RAM by donors of their own: `0-2G=a+b,2G-4G=c`. Ranges begin
    /// and end at multiples of 16M; what is in none is with any donor, or those of --donors
    #[arg(long = "range", value_name = "FROM-TO=DONOR[+DONOR...],...", value_delimiter = ',')]
    ranges: Vec<Range>,
}

/// A range of a VM's RAM, as the command line writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Range(RamRange);

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Range, String> {
        let bad = || format!("`{text}` is no range: write it as 0-2G=DONOR, or 0-2G=DONOR+DONOR");
        let (range, donors) = text.split_once('=').ok_or_else(bad)?;
        let (start, end) = range.split_once('-').ok_or_else(bad)?;
        let size = |text: &str| text.parse::<Size>().map_err(|error| format!("{text}: {error}"));
        let donors: Vec<String> = donors.split('+').map(str::to_owned).collect();
        if donors.iter().any(String::is_empty) {
            return Err(bad());
        }
        // 0 is the beginning of RAM.
        let start = if start == "0" { 0 } else { size(start)?.0 };
        Ok(Range(RamRange { start, end: size(end)?.0, donors }))
    }
}

impl PoolArgs {
    /// Checks the options of a program.
    pub(crate) fn check(&self) -> anyhow::Result<Wanted> {
        self.checked(Vec::new())
    }

    /// Checks the options of a volume, which takes no `--lease`.
    pub(crate) fn check_for_volume(&self) -> anyhow::Result<Wanted> {
        if self.lease != DEFAULT_LEASE_S {
            usage!("--lease is not for volumes, and so not for --via swap");
        }
        self.check()
    }

    /// Checks the options and RAM ranges of a VM.
    pub(crate) fn check_with(&self, ranges: &RangeArgs) -> anyhow::Result<Wanted> {
        self.checked(ranges.ranges())
    }

    fn checked(&self, ranges: Vec<RamRange>) -> anyhow::Result<Wanted> {
        checked(Wanted {
            copies: self.copies.mirror,
            donors: self.copies.donors.clone(),
            ranges,
            donor_patience_s: Some(self.donor_patience),
            lease_s: Some(self.lease),
            encrypt: self.copies.encrypt,
            scrub_bytes_per_s: Some(self.copies.scrub_bytes_per_s()),
            copying_bytes_per_s: Some(self.copies.copying_bytes_per_s()),
            failover_ms: Some(self.copies.failover),
            cold: self.cold()?,
        })
    }
}

impl PoolArgs {
    fn cold(&self) -> anyhow::Result<Option<Cold>> {
        let Some(code) = self.ec else { return Ok(None) };
        if self.copies.mirror == Some(1) {
            usage!(
                "--ec {code} is for memory that is kept in copies while it is used: give --mirror 2 or 3"
            );
        }
        Ok(Some(Cold { code, after: Duration::from_secs(self.cold_after) }))
    }
}

impl RangeArgs {
    /// Checks the ranges of a running VM; `donors` back the RAM outside all ranges.
    pub(crate) fn check(&self, donors: Vec<String>) -> anyhow::Result<Wanted> {
        checked(Wanted { donors, ranges: self.ranges(), ..Wanted::default() })
    }

    fn ranges(&self) -> Vec<RamRange> {
        self.ranges.iter().map(|range| range.0.clone()).collect()
    }
}

fn checked(wanted: Wanted) -> anyhow::Result<Wanted> {
    let placement: Placement = wanted.clone().or(1);
    if let Err(error) = placement.check() {
        usage!("{error}");
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scrub_has_a_rate_or_is_off() {
        assert_eq!("64M".parse(), Ok(ScrubRate(64 << 20)));
        assert_eq!("off".parse(), Ok(ScrubRate(0)));
        for bad in ["", "on", "-1M"] {
            assert!(bad.parse::<ScrubRate>().is_err(), "{bad}");
        }
    }

    #[test]
    fn ranges_are_read() {
        let Range(range) = "0-2G=a+b".parse().unwrap();
        assert_eq!((range.start, range.end), (0, 2 << 30));
        assert_eq!(range.donors, ["a", "b"]);
        for bad in ["", "0-2G", "2G=a", "0-2G=", "0-2G=a+", "x-2G=a"] {
            assert!(bad.parse::<Range>().is_err(), "{bad}");
        }
    }
}
