//! What the user wants of the pool: copies, donors, ranges of a machine's RAM.

use crate::failure::usage;
use hecaton_memory::Size;
use hecaton_node::message::Wanted;
use hecaton_pager::{Placement, RamRange};
use std::str::FromStr;

/// Copies, donors and encryption, for programs and machines.
#[derive(clap::Args)]
pub(crate) struct PoolArgs {
    /// Copies of each page in the pool, at different donors and on different hosts where there are
    /// several: with 2 or 3, nothing is lost with a donor [default: the node's, or else 1]
    #[arg(long, value_name = "N")]
    mirror: Option<u8>,
    /// Uses these donors only
    #[arg(long, value_name = "DONOR,...", value_delimiter = ',')]
    donors: Vec<String>,
    /// Seconds that a donor may be away: a program that wants a page that only donors have that are
    /// away for longer is ended, a machine is stopped
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    donor_patience: u64,
    /// Seconds that donors keep the memory without hearing from this host: for so long it may be cut
    /// off from them and lose nothing, and so long they wait for their memory if it is gone
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(8..=86_400))]
    lease: u64,
    /// Encrypts pages before they leave this host, with a key that never does: donors can neither read
    /// nor alter them
    #[arg(long)]
    encrypt: bool,
    /// Bytes that donors may read in a second, all together, to compare the copies of pages with
    /// `--mirror` and mend what has gone bad; with `off`, only what came back wrong is looked at
    #[arg(long, value_name = "SIZE", default_value = "32M")]
    scrub: ScrubRate,
}

/// How fast copies are compared, in bytes a second; 0 for not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ScrubRate(u64);

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
    /// Backs parts of the machine's RAM by donors of their own: `0-2G=a+b,2G-4G=c`. Ranges begin and
    /// end at multiples of 16M; what is in none is with any donor, or those of --donors
    #[arg(long = "range", value_name = "FROM-TO=DONOR[+DONOR...],...", value_delimiter = ',')]
    ranges: Vec<Range>,
}

/// A part of a machine's RAM, as it is written on the command line.
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
        // Zero is no size, and the beginning of RAM.
        let start = if start == "0" { 0 } else { size(start)?.0 };
        Ok(Range(RamRange { start, end: size(end)?.0, donors }))
    }
}

impl PoolArgs {
    /// For a program.
    pub(crate) fn check(&self) -> anyhow::Result<Wanted> {
        self.checked(Vec::new())
    }

    /// For a machine.
    pub(crate) fn check_with(&self, ranges: &RangeArgs) -> anyhow::Result<Wanted> {
        self.checked(ranges.ranges())
    }

    fn checked(&self, ranges: Vec<RamRange>) -> anyhow::Result<Wanted> {
        checked(Wanted {
            copies: self.mirror,
            donors: self.donors.clone(),
            ranges,
            donor_patience_s: Some(self.donor_patience),
            lease_s: Some(self.lease),
            encrypt: self.encrypt,
            scrub_bytes_per_s: Some(self.scrub.0),
        })
    }
}

impl RangeArgs {
    /// For a machine that runs, with the donors for what is in no range.
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
