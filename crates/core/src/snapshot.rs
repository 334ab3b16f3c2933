//! PostgreSQL snapshots as text, `xmin:xmax:running,running,…`, and points in the changelog, which are made of them.

/// What a transaction saw of others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Transactions from here on had not ended.
    xmax: u64,
    /// Earlier ones that had not ended either, ascending.
    running: Vec<u64>,
}

impl Snapshot {
    /// Reads PostgreSQL's text.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let _xmin: u64 = parts.next()?.parse().ok()?;
        let xmax = parts.next()?.parse().ok()?;
        let mut running = parts.next()?.split(',').filter(|xid| !xid.is_empty()).map(str::parse).collect::<Result<Vec<u64>, _>>().ok()?;
        running.sort_unstable();
        parts.next().is_none().then_some(Snapshot { xmax, running })
    }

    fn oldest_unseen(&self) -> u64 {
        self.running.first().copied().map_or(self.xmax, |first| first.min(self.xmax))
    }

    /// Whether the transaction had ended, as `pg_visible_in_snapshot` says it.
    pub fn sees(&self, xid: u64) -> bool {
        xid < self.xmax && self.running.binary_search(&xid).is_err()
    }
}

/// A point in the changelog: what lies after it is what `seen` does not see, what of the last tick comes after the change `bound`, and later epochs.
#[derive(Clone, Debug)]
pub struct Point {
    /// The epoch of the transaction ids.
    pub epoch: i32,
    /// What is seen at most.
    pub seen: Snapshot,
    /// Of what this one does not see, only changes up to `bound` belong to the point. `None`: all of them.
    pub settled: Option<Snapshot>,
    /// The last change that belongs to the point.
    pub bound: i64,
    /// Changes with a higher number all lie after the point; of the others, some may.
    pub high: i64,
}

impl Point {
    /// A transaction id below which all changes of the epoch belong to the point.
    pub fn oldest_unseen(&self) -> u64 {
        [Some(&self.seen), self.settled.as_ref()].into_iter().flatten().map(Snapshot::oldest_unseen).min().unwrap_or(0)
    }

    /// Whether the other point sees more.
    pub fn is_before(&self, other: &Point) -> bool {
        self.epoch < other.epoch || self.epoch == other.epoch && (self.seen.xmax, self.bound_or_all()) < (other.seen.xmax, other.bound_or_all())
    }

    fn bound_or_all(&self) -> i64 {
        if self.settled.is_some() { self.bound } else { i64::MAX }
    }

    /// Whether a change lies after the point. For the changes of one key, in their order, it is false up to some change and true from there on.
    pub fn precedes(&self, epoch: i32, xid: u64, seq: i64) -> bool {
        epoch > self.epoch
            || epoch == self.epoch && (!self.seen.sees(xid) || seq > self.bound && self.settled.as_ref().is_some_and(|settled| !settled.sees(xid)))
    }
}

/// The snapshot with transaction `own` counted as running. `None` if either text is not what PostgreSQL writes.
pub fn with_running(snapshot: &str, own: &str) -> Option<String> {
    let own: u64 = own.parse().ok()?;
    let mut parts = snapshot.split(':');
    let xmin: u64 = parts.next()?.parse().ok()?;
    let xmax: u64 = parts.next()?.parse().ok()?;
    let mut running = parts.next()?.split(',').filter(|xid| !xid.is_empty()).map(str::parse).collect::<Result<Vec<u64>, _>>().ok()?;
    if parts.next().is_some() {
        return None;
    }
    if own >= xmax {
        return Some(snapshot.to_string()); // not yet begun, as far as the snapshot knows
    }
    running.push(own);
    running.sort_unstable();
    running.dedup();
    let running: Vec<String> = running.iter().map(u64::to_string).collect();
    Some(format!("{}:{xmax}:{}", xmin.min(own), running.join(",")))
}

/// The snapshot with transaction `own` counted as ended, and nothing else changed: what had not begun by then counts as running. `None` if either text is not
/// what PostgreSQL writes.
pub fn with_ended(snapshot: &str, own: &str) -> Option<String> {
    let own: u64 = own.parse().ok()?;
    let (xmin, rest) = snapshot.split_once(':')?;
    let (xmax, running) = rest.split_once(':')?;
    let xmax: u64 = xmax.parse().ok()?;
    if own < xmax {
        return Some(snapshot.to_string());
    }
    let mut all: Vec<String> = running.split(',').filter(|xid| !xid.is_empty()).map(str::to_string).collect();
    all.extend((xmax..own).map(|xid| xid.to_string()));
    let first = if own == xmax && all.is_empty() { (own + 1).to_string() } else { xmin.to_string() };
    Some(format!("{first}:{}:{}", own + 1, all.join(",")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Point, Snapshot, with_ended, with_running};

    #[test]
    fn a_snapshot_sees_what_had_ended() {
        let snapshot = Snapshot::parse("100:110:100,105").unwrap();
        let seen: Vec<u64> = (98..112).filter(|xid| snapshot.sees(*xid)).collect();
        assert_eq!(seen, [98, 99, 101, 102, 103, 104, 106, 107, 108, 109]);
        assert_eq!(Snapshot::parse("1:1:").map(|empty| empty.sees(0)), Some(true));
        for text in ["", "1:2", "1:2:x", "1:2:3:4"] {
            assert_eq!(Snapshot::parse(text), None, "{text}");
        }
    }

    #[test]
    fn what_follows_a_point_is_unseen_or_behind_its_last_change_or_of_a_later_epoch() {
        let tag = Point { epoch: 2, seen: Snapshot::parse("100:110:105").unwrap(), settled: None, bound: 0, high: 50 };
        assert!(!tag.precedes(1, 999, 60) && !tag.precedes(2, 104, 60));
        assert!(tag.precedes(2, 105, 1) && tag.precedes(2, 110, 1) && tag.precedes(3, 1, 1));
        let position = Point { settled: Snapshot::parse("100:103:"), bound: 40, ..tag };
        assert!(!position.precedes(2, 102, 41), "of an earlier tick");
        assert!(!position.precedes(2, 104, 40) && position.precedes(2, 104, 41), "of the tick the position lies in");
        assert!(position.precedes(2, 110, 1));
    }

    #[test]
    fn an_ended_transaction_leaves_those_before_it_running() {
        assert_eq!(with_ended("100:110:100,105", "103").as_deref(), Some("100:110:100,105"));
        assert_eq!(with_ended("100:110:100", "112").as_deref(), Some("100:113:100,110,111"));
        assert_eq!(with_ended("110:110:", "112").as_deref(), Some("110:113:110,111"));
        assert_eq!(with_ended("110:110:", "110").as_deref(), Some("111:111:"));
        assert_eq!(with_ended("110", "110"), None);
    }

    #[test]
    fn a_transaction_is_inserted_in_order() {
        assert_eq!(with_running("100:110:100,105", "103").as_deref(), Some("100:110:100,103,105"));
        assert_eq!(with_running("105:110:105", "100").as_deref(), Some("100:110:100,105"));
        assert_eq!(with_running("110:110:", "109").as_deref(), Some("109:110:109"));
    }

    #[test]
    fn what_the_snapshot_already_excludes_stays_as_it_is() {
        assert_eq!(with_running("100:110:100", "110").as_deref(), Some("100:110:100"));
        assert_eq!(with_running("100:110:100", "100").as_deref(), Some("100:110:100"));
    }

    #[test]
    fn other_text_is_refused() {
        for (snapshot, own) in [("", "1"), ("1:2", "1"), ("1:2:x", "1"), ("1:2:3:4", "1"), ("1:2:", "-1")] {
            assert_eq!(with_running(snapshot, own), None, "{snapshot}");
        }
    }
}
