//! An hour of arrivals at ten hosts, from Azure Public Dataset V1: made by `scripts/azure-hour.sh`.

use anyhow::{Context as _, bail};

/// Attribution of the data: must be shown wherever the hour is shown.
pub(super) const SOURCE: &str = "Azure Public Dataset V1 (Microsoft, CC-BY 4.0), as prepared by \
                                 huaweicloud/trace_generation_rnn; one hour of 10 of 512 hosts, changed by \
                                 scripts/azure-hour.sh";

const FILE: &str = include_str!("azure-v1-hour.csv");

/// Memory of a host for virtual machines: the paper's servers have 512 GiB, and keep 64.
pub(super) const HOST_GIB: f64 = 448.0;

/// A harvest VM's minimum.
pub(super) const MIN_GIB: f64 = 32.0;

/// How long it is, in seconds.
pub(super) const SECONDS: f64 = 3600.0;

/// A host.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Hour {
    /// Memory of the regular VMs that stay for the whole hour.
    pub(super) staying_gib: f64,
    pub(super) machines: Vec<Regular>,
}

impl Hour {
    /// Memory for the other regular VMs and for harvest VMs.
    pub(super) fn left_gib(&self) -> f64 {
        HOST_GIB - self.staying_gib
    }
}

/// A regular VM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Regular {
    /// None: it is there from the start.
    pub(super) arrives_s: Option<f64>,
    /// None: it stays.
    pub(super) leaves_s: Option<f64>,
    pub(super) gib: f64,
}

/// The hosts of the file.
pub(super) fn hours() -> anyhow::Result<Vec<Hour>> {
    parse(FILE)
}

fn parse(text: &str) -> anyhow::Result<Vec<Hour>> {
    let mut hours: Vec<Hour> = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let host = take(line, &mut hours).with_context(|| format!("the hour has {line:?}"))?;
        let (machine, gib) = host;
        let hour = hours.last_mut().context("a machine before its host")?;
        match machine {
            Some(machine) => hour.machines.push(Regular { gib, ..machine }),
            None => hour.staying_gib = gib,
        }
    }
    Ok(hours)
}

/// A line's machine, if it is not a host's first one, and its size.
fn take(line: &str, hours: &mut Vec<Hour>) -> anyhow::Result<(Option<Regular>, f64)> {
    let &[host, arrives, leaves, gib] = line.split(',').collect::<Vec<_>>().as_slice() else {
        bail!("not four fields");
    };
    let (host, gib): (usize, f64) = (host.parse()?, gib.parse()?);
    if arrives == "stays" {
        anyhow::ensure!(host == hours.len(), "host {host} is not the next one");
        hours.push(Hour::default());
        return Ok((None, gib));
    }
    anyhow::ensure!(host + 1 == hours.len(), "host {host} is another one's");
    let arrives_s = Some(arrives.parse()?).filter(|second| *second > 0.0);
    let leaves_s = (!leaves.is_empty()).then(|| leaves.parse()).transpose()?;
    Ok((Some(Regular { arrives_s, leaves_s, gib }), gib))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_host_of_the_file_has_room_for_a_harvest_vm_at_any_time() {
        assert!(FILE.contains("CC-BY 4.0") && FILE.contains("huaweicloud/trace_generation_rnn"));
        let hours = hours().unwrap();
        assert_eq!(hours.len(), 10);
        for hour in hours {
            assert!(hour.machines.iter().any(|machine| machine.arrives_s.is_some()));
            for at in hour.machines.iter().map(|machine| machine.arrives_s.unwrap_or(0.0)) {
                let is_there = |machine: &&Regular| {
                    machine.arrives_s.unwrap_or(0.0) <= at
                        && machine.leaves_s.is_none_or(|leaves| leaves > at)
                };
                let there = hour.machines.iter().filter(is_there);
                let gib: f64 = there.map(|machine| machine.gib).sum();
                assert!(gib + MIN_GIB <= hour.left_gib(), "{gib} at {at}: {hour:?}");
            }
        }
    }

    #[test]
    fn a_file_that_is_damaged_is_refused() {
        let good = "# text\n0,stays,,100\n0,0,900,1.75\n0,626,,14\n1,stays,,50\n";
        let hours = parse(good).unwrap();
        assert_eq!((hours.len(), hours[0].machines.len(), hours[1].staying_gib), (2, 2, 50.0));
        let regular = |arrives_s, leaves_s, gib| Regular { arrives_s, leaves_s, gib };
        let machines = [regular(None, Some(900.0), 1.75), regular(Some(626.0), None, 14.0)];
        assert_eq!(hours[0].machines, machines);
        for bad in ["0,1,2", "0,stays,,x", "1,stays,,1", "0,626,,14", "0,stays,,1\n1,626,,14"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
