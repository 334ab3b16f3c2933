//! Where the history of a task is kept. A task's id says it all: its last byte is the retention class, its first six the time, so the partition (the *leaf*)
//! follows by arithmetic, with nothing to look up and nothing to keep in step.
//!
//! A class stands for one retention and what becomes of partitions that are past it. How much time one partition holds depends on the class's number alone: a fifth of the
//! numbers each for months, weeks, days, quarter days and hours.

/// What the history of one task is divided into.
pub const PARTS: [&str; 3] = ["task_facts", "task_attempts", "task_outcomes"];

/// The class of tasks that are kept for ever.
pub const FOR_EVER: u8 = 0;

const HOUR_MS: i64 = 3_600_000;
const DAY_MS: i64 = 24 * HOUR_MS;

/// How much time one partition holds, in milliseconds; the place in this list, times [`CLASSES_EACH`], is the first class of that width.
const WIDTHS: [i64; 5] = [30 * DAY_MS, 7 * DAY_MS, DAY_MS, 6 * HOUR_MS, HOUR_MS];

/// How many classes there are of each width.
pub const CLASSES_EACH: u8 = 51;

/// About so many partitions fit into a retention.
const PARTITIONS: i64 = 30;

/// The first class for a retention in microseconds; [`CLASSES_EACH`] of them have partitions of that width.
pub fn first_class(retention_micros: i64) -> u8 {
    let share = retention_micros / 1000 / PARTITIONS;
    let at = WIDTHS.iter().position(|width| *width <= share).unwrap_or(WIDTHS.len() - 1);
    u8::try_from(at).unwrap_or(0) * CLASSES_EACH
}

/// How much time a partition of the class holds, in milliseconds; `None` for the one number that is no class.
pub fn width_ms(class: u8) -> Option<i64> {
    WIDTHS.get(usize::from(class / CLASSES_EACH)).copied()
}

/// The partitions that hold the tasks of one class and period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Leaf {
    /// The retention class.
    pub class: u8,
    /// When the period starts, in milliseconds since 1970-01-01 UTC.
    pub starts_ms: i64,
}

/// The milliseconds since 1970 in a UUIDv7.
pub fn time_ms(id: &[u8; 16]) -> i64 {
    id[..6].iter().fold(0, |ms, byte| ms << 8 | i64::from(*byte))
}

/// The least id of an instant.
fn least_id(ms: i64) -> String {
    let ms = ms.clamp(0, (1 << 48) - 1);
    format!("{:08x}-{:04x}-0000-0000-000000000000", ms >> 16, ms & 0xffff)
}

impl Leaf {
    /// The leaf of a task; `None` for an id that no task has.
    pub fn of(id: &[u8; 16]) -> Option<Self> {
        Self::at(id[15], time_ms(id))
    }

    /// The same for an id that anybody may have made up: `None` where it is no version 7 UUID of this century.
    pub fn of_task(id: &[u8; 16]) -> Option<Self> {
        const CENTURY: std::ops::Range<i64> = 946_684_800_000..4_102_444_800_000;
        Self::of(id).filter(|_| id[6] >> 4 == 7 && id[8] >> 6 == 2 && CENTURY.contains(&time_ms(id)))
    }

    /// The leaf of a class at an instant.
    pub fn at(class: u8, ms: i64) -> Option<Self> {
        let width = width_ms(class)?;
        Some(Leaf { class, starts_ms: ms - ms.rem_euclid(width) })
    }

    fn width_ms(self) -> i64 {
        width_ms(self.class).unwrap_or(DAY_MS)
    }

    /// When the period is over, in milliseconds since 1970.
    pub fn ends_ms(self) -> i64 {
        self.starts_ms + self.width_ms()
    }

    /// The leaf of the next period.
    pub fn next(self) -> Self {
        Leaf { starts_ms: self.ends_ms(), ..self }
    }

    /// What the names of its tables end in: `c0_20260101`, with the hour where it holds less than a day.
    pub fn suffix(self) -> String {
        let (days, hour) = (self.starts_ms.div_euclid(DAY_MS), self.starts_ms.rem_euclid(DAY_MS) / HOUR_MS);
        let (year, month, day) = date(days);
        let hour = if self.width_ms() < DAY_MS { format!("{hour:02}") } else { String::new() };
        format!("c{}_{year:04}{month:02}{day:02}{hour}", self.class)
    }

    /// The leaf whose names end so; `None` where no leaf's do.
    pub fn parse(suffix: &str) -> Option<Self> {
        let (class, time) = suffix.strip_prefix('c')?.split_once('_')?;
        let class: u8 = class.parse().ok()?;
        let day_digits = time.len().checked_sub(if width_ms(class)? < DAY_MS { 2 } else { 0 })?;
        let (day, hour) = (time.get(..day_digits)?, time.get(day_digits..)?);
        let year_digits = day_digits.checked_sub(4)?;
        let days = days(
            day.get(..year_digits)?.parse().ok()?,
            day.get(year_digits..year_digits + 2)?.parse().ok()?,
            day.get(year_digits + 2..)?.parse().ok()?,
        );
        let hour: i64 = if hour.is_empty() { 0 } else { hour.parse().ok()? };
        let leaf = Leaf { class, starts_ms: days * DAY_MS + hour * HOUR_MS };
        (leaf.suffix() == suffix && Leaf::at(class, leaf.starts_ms) == Some(leaf)).then_some(leaf)
    }

    /// Its bounds as ids: the least that belongs to it, and the least that belongs to the next.
    pub fn bounds(self) -> (String, String) {
        (least_id(self.starts_ms), least_id(self.ends_ms()))
    }
}

/// Year, month and day of a day since 1970-01-01 (the civil calendar from days, in 400-year eras that start in March).
fn date(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// The inverse of [`date`].
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let shifted_month = if month > 2 { month - 3 } else { month + 9 };
    let day_of_year = (153 * shifted_month + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MICROS_PER_DAY: i64 = 86_400_000_000;

    #[test]
    fn a_retention_holds_some_thirty_partitions() {
        for (days, width) in [(1, HOUR_MS), (7, HOUR_MS), (8, 6 * HOUR_MS), (30, DAY_MS), (90, DAY_MS), (365, 7 * DAY_MS), (1000, 30 * DAY_MS)] {
            assert_eq!(width_ms(first_class(days * MICROS_PER_DAY)), Some(width), "{days} days");
        }
        assert_eq!(width_ms(first_class(3_600_000_000)), Some(HOUR_MS));
        assert_eq!(width_ms(FOR_EVER), Some(30 * DAY_MS));
        assert_eq!(width_ms(255), None);
    }

    #[test]
    fn names_are_dates() {
        let at = 1_767_225_600_000 + 5 * HOUR_MS + 7; // 2026-01-01 05:00
        assert_eq!(Leaf::at(102, at).map(Leaf::suffix), Some("c102_20260101".to_string()));
        assert_eq!(Leaf::at(204, at).map(Leaf::suffix), Some("c204_2026010105".to_string()));
        assert_eq!(Leaf::at(153, at).map(Leaf::suffix), Some("c153_2026010100".to_string()));
        let leap = Leaf::at(102, 1_709_164_800_000).map(Leaf::suffix);
        assert_eq!(leap, Some("c102_20240229".to_string()));
        for wrong in ["", "c1", "c0_2026", "c255_20260101", "c102_20260230", "c204_20260101", "x0_20260101", "c0_20260101x", "c0_é0260101"] {
            assert_eq!(Leaf::parse(wrong), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn an_id_belongs_to_one_leaf_whose_bounds_hold_it(id: [u8; 16]) {
            match Leaf::of(&id) {
                None => prop_assert_eq!(id[15], 255),
                Some(leaf) => {
                    let text = uuid::Uuid::from_bytes(id).to_string();
                    let (least, next) = leaf.bounds();
                    prop_assert!(least <= text);
                    prop_assert!(text < next || leaf.ends_ms() >= 1 << 48);
                    prop_assert_eq!(leaf.class, id[15]);
                    prop_assert!(leaf.starts_ms <= time_ms(&id) && time_ms(&id) < leaf.ends_ms());
                    prop_assert_eq!(Leaf::parse(&leaf.suffix()), Some(leaf));
                    prop_assert_eq!(leaf.bounds().1, leaf.next().bounds().0);
                }
            }
        }

        #[test]
        fn dates_go_back_and_forth(day in -1_000_000i64..4_000_000) {
            let (year, month, of_month) = date(day);
            prop_assert_eq!(days(year, month, of_month), day);
        }

        #[test]
        fn no_partition_is_wider_than_its_retention(hours in 1i64..100_000) {
            let class = first_class(hours * 3_600_000_000);
            prop_assert!(width_ms(class).is_some_and(|width| width <= hours * HOUR_MS));
        }
    }
}
