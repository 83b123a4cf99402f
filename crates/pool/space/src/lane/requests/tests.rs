use super::*;

/// A group of two, and how many writes have ended.
struct Two(Group, u32);

impl Groups for Two {
    fn whereabouts(&mut self, _: u64) -> Whereabouts {
        Whereabouts::Held(self.0)
    }

    fn desert(&mut self, _: u64, _: Place) -> bool {
        unreachable!("no member has the write")
    }

    fn gone(&mut self, _: u64, _: Place) {}

    fn shards(&mut self, _: u64) -> Option<Shards> {
        None
    }

    fn write_ends(&mut self, _: u64) {
        self.1 += 1;
    }
}

const BOOT: u64 = 7;
const FAILOVER: Duration = Duration::from_millis(150);

fn place(donor: u32) -> Place {
    Place { donor: DonorIndex(donor), boot: BOOT, extent: ExtentId(1) }
}

#[test]
fn what_was_sent_to_one_that_answers_again_and_to_no_other_has_ended() {
    let mut group = Group::new(Generation(3));
    (0..2).for_each(|donor| group.add(place(donor), true));
    let mut groups = Two(group, 0);
    let patience = Duration::from_secs(1);
    let mut requests = Requests::new(Limits { patience, stall: patience }, FAILOVER);
    let (first, start) = (DonorIndex(0), Duration::ZERO);
    assert!(requests.flights.begin_connect(first, start));
    requests.flights.opened(first, BOOT);
    let writing = requests.write(5, 0, group);
    requests.sending(&writing, place(0), 1, start);
    requests.give_up(&writing, place(1), Cause::Unreachable);
    requests.sent(&writing, &mut groups, start);
    requests.flights.broke(first, FAILOVER);
    requests.fail_over(first, &mut groups, FAILOVER);
    assert_eq!((requests.next_end(), groups.1), (None, 0), "it may still land");
    assert!(requests.flights.begin_connect(first, FAILOVER));
    requests.flights.opened(first, BOOT);
    requests.settle(&mut groups, FAILOVER);
    let ended = requests.next_end();
    assert!(matches!(ended, Some(End::Failed { cause: Cause::Unreachable, .. })), "{ended:?}");
    assert_eq!(groups.1, 1, "its segment may be coded");
}
