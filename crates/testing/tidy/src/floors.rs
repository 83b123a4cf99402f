//! Finds dependencies on crates of higher floors.
//!
//! `crates/FLOOR/CRATE` gives a crate its floor. A crate may use every crate of a lower floor, and
//! those of its own floor that stand before it in [`FLOORS`]. Dev-dependencies are not checked.

use crate::manifest::Package;
use crate::rule::{Finding, Rule};
use std::collections::BTreeMap;

/// Floors from bottom to top. A crate may use the crates before it on its floor.
const FLOORS: [(&str, &[&str]); 9] = [
    ("base", &["units", "host", "memory", "uffd", "process", "pki"]),
    ("decide", &["paging", "sharing", "broker", "migration"]),
    ("protocol", &["page", "fabric", "api"]),
    ("pool", &["donor", "space"]),
    ("consumers", &["pager", "preload", "volume", "tmem", "memcached"]),
    ("machines", &["vm", "guest"]),
    ("control", &["agent", "node", "manager", "launch"]),
    ("tools", &["report", "fleet"]),
    ("testing", &["netns", "faults", "testkit", "simulation", "bench", "e2e"]),
];

/// The command, which uses everything.
const COMMAND: &str = "crates/hecaton";

/// The place of a crate: its floor, and its position there if the list has it.
#[derive(Clone, Copy, Debug)]
struct Place {
    floor: usize,
    position: Option<usize>,
}

/// Counts, for each crate, the dependencies that it must not have.
pub(crate) fn check(packages: &[Package]) -> Vec<Finding> {
    let housed = || packages.iter().filter(|package| package.folder.starts_with("crates/"));
    let by_name: BTreeMap<&str, &Package> =
        housed().map(|package| (package.name.as_str(), package)).collect();
    housed()
        .filter_map(|package| {
            let refused: Vec<String> = match place(&package.folder) {
                None => vec![format!("{} is on no floor", package.folder)],
                Some(user) => package
                    .dependencies
                    .iter()
                    .filter_map(|name| by_name.get(name.as_str()))
                    .filter(|used| !place(&used.folder).is_some_and(|used| may_use(user, used)))
                    .map(|used| format!("uses {} ({})", used.name, used.folder))
                    .collect(),
            };
            (!refused.is_empty()).then(|| Finding {
                rule: Rule::Floors,
                path: package.folder.clone(),
                value: u32::try_from(refused.len()).unwrap_or(u32::MAX),
                detail: refused.join("; "),
            })
        })
        .collect()
}

fn place(folder: &str) -> Option<Place> {
    if folder == COMMAND {
        return Some(Place { floor: FLOORS.len(), position: None });
    }
    let (floor, name) = folder.strip_prefix("crates/")?.split_once('/')?;
    let index = FLOORS.iter().position(|(known, _)| *known == floor)?;
    let position = FLOORS[index].1.iter().position(|known| *known == name);
    Some(Place { floor: index, position })
}

/// A crate that the list lacks uses no crate of its own floor, and none of them uses it.
fn may_use(user: Place, used: Place) -> bool {
    let before = used.position.zip(user.position).is_some_and(|(used, user)| used < user);
    used.floor < user.floor || (used.floor == user.floor && before)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn package(folder: &str, dependencies: &[&str]) -> Package {
        Package {
            name: folder.rsplit('/').next().expect("a name").to_owned(),
            folder: folder.to_owned(),
            dependencies: dependencies.iter().map(|&name| name.to_owned()).collect(),
            roots: BTreeSet::new(),
        }
    }

    fn found(packages: &[Package]) -> Vec<(String, u32)> {
        check(packages).into_iter().map(|finding| (finding.path, finding.value)).collect()
    }

    #[test]
    fn check_accepts_lower_floors_and_earlier_crates() {
        let packages = [
            package("crates/base/memory", &["libc"]),
            package("crates/pool/donor", &["memory"]),
            package("crates/pool/space", &["memory", "donor"]),
            package("crates/testing/netns", &["space"]),
            package("crates/hecaton", &["netns", "space"]),
            package("fuzz", &["space"]),
        ];
        assert_eq!(found(&packages), []);
    }

    #[test]
    fn check_counts_each_dependency_upward() {
        let packages = [
            package("crates/base/memory", &["donor", "space"]),
            package("crates/pool/donor", &["space", "netns"]),
            package("crates/pool/space", &[]),
            package("crates/testing/netns", &["hecaton"]),
            package("crates/hecaton", &[]),
        ];
        let expected =
            [("crates/base/memory", 2), ("crates/pool/donor", 2), ("crates/testing/netns", 1)];
        assert_eq!(found(&packages), expected.map(|(path, count)| (path.to_owned(), count)));
        assert_eq!(
            check(&packages)[1].detail,
            "uses netns (crates/testing/netns); uses space (crates/pool/space)"
        );
    }

    #[test]
    fn check_refuses_crates_outside_the_list() {
        let packages = [
            package("crates/decide/policy", &["sharing"]),
            package("crates/decide/sharing", &[]),
            package("crates/attic/old", &[]),
        ];
        let expected = [("crates/decide/policy", 1), ("crates/attic/old", 1)];
        assert_eq!(found(&packages), expected.map(|(path, count)| (path.to_owned(), count)));
    }
}
